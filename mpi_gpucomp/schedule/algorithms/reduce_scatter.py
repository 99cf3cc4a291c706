"""Reduce-scatter: the sum of all vectors, a block of it to each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.info import AlgorithmInfo, doublings
from mpi_gpucomp.schedule.algorithms.partial_sums import Sums, alone
from mpi_gpucomp.schedule.builder import o

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.builder import ScheduleBuilder

__all__ = ["ALGORITHMS"]


def ring(plan: ScheduleBuilder) -> None:
    """Add up each rank's block on its way around a ring."""
    Sums(plan).ring(range(plan.ranks))
    alone(plan)


def halving(plan: ScheduleBuilder) -> None:
    """Exchange halves, quarters, ... of the sums; ranks beyond a power of two hand in theirs, and get their block."""
    core = 1 << plan.ranks.bit_length() - 1
    sums = Sums(plan)
    sums.fold(core, plan.ranks)
    for distance in reversed(doublings(core)):
        extras = sums.halve(core, distance, core, plan.ranks)
        sums.add(*sums.halve(core, distance, 0, core), *extras)
    for extra in range(core, plan.ranks):
        plan.copy(extra - core, sums.place(extra - core, extra), extra, o(0))
    alone(plan)


ALGORITHMS = (
    AlgorithmInfo("ring", ring, "adds up around a ring", "long vectors"),
    AlgorithmInfo(
        "halving", halving, "exchanges halves, quarters, ...", "short vectors, few lossy steps, ranks a power of two"
    ),
)
