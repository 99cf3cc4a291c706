"""Reduce-scatter: the sum of all vectors, one block to each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.common import AlgorithmInfo, PartialSums, doublings, power_of_two, single_rank
from mpi_gpucomp.schedule.builder import o

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.builder import ScheduleBuilder

__all__ = ["ALGORITHMS"]


def ring(builder: ScheduleBuilder) -> None:
    """Reduce each rank's block around a ring that ends at that rank."""
    PartialSums(builder).ring(range(builder.ranks))
    single_rank(builder)


def halving(builder: ScheduleBuilder) -> None:
    """Reduce by recursive halving; ranks beyond a power of two send their vectors first and receive last."""
    core = power_of_two(builder.ranks)
    sums = PartialSums(builder)
    sums.fold(core, builder.ranks)
    for distance in reversed(doublings(core)):
        extras = sums.halve(core, distance, core, builder.ranks)
        sums.add(*sums.halve(core, distance, 0, core), *extras)
    for extra in range(core, builder.ranks):
        builder.copy(extra - core, sums.place(extra - core, extra), extra, o(0))
    single_rank(builder)


ALGORITHMS = (
    AlgorithmInfo("ring", ring, "reduces around a ring", "long vectors"),
    AlgorithmInfo(
        "halving",
        halving,
        "exchanges halves, quarters, ...",
        "short vectors, few lossy steps, ranks a power of two",
    ),
)
