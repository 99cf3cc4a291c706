"""Reduce: the sum of all vectors to the root, which is rank 0 here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.info import AlgorithmInfo, binomial
from mpi_gpucomp.schedule.algorithms.partial_sums import Sums, alone

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.builder import ScheduleBuilder

__all__ = ["ALGORITHMS"]


def chain(plan: ScheduleBuilder) -> None:
    """Pass each chunk from the last rank to the first, which each adds its own to."""
    sums = Sums(plan)
    for rank in reversed(range(1, plan.ranks)):
        sums.add((rank, rank - 1, 0, 1))
    alone(plan)


def binomial_tree(plan: ScheduleBuilder) -> None:
    """Add pairs of ranks, then pairs of sums, and so on."""
    sums = Sums(plan)
    for edges in reversed(list(binomial(plan.ranks))):
        for parent, child, _ in edges:
            sums.add((child, parent, 0, 1))
    alone(plan)


ALGORITHMS = (
    AlgorithmInfo("chain", chain, "adds up from rank to rank", "long vectors"),
    AlgorithmInfo("binomial", binomial_tree, "adds up pairs, then pairs of pairs", "short vectors, few lossy steps"),
)
