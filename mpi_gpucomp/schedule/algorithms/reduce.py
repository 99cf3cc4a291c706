"""Reduce: the sum of all vectors to the root, which is rank 0 here (`builder.rotate` moves it)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.common import AlgorithmInfo, PartialSums, binomial, single_rank

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.builder import ScheduleBuilder

__all__ = ["ALGORITHMS"]


def chain(builder: ScheduleBuilder) -> None:
    """Forward partial sums from the last rank to the first; each rank adds its own chunk."""
    sums = PartialSums(builder)
    for rank in reversed(range(1, builder.ranks)):
        sums.add((rank, rank - 1, 0, 1))
    single_rank(builder)


def binomial_tree(builder: ScheduleBuilder) -> None:
    """Reduce up a binomial tree."""
    sums = PartialSums(builder)
    for edges in reversed(list(binomial(builder.ranks))):
        for parent, child, _ in edges:
            sums.add((child, parent, 0, 1))
    single_rank(builder)


ALGORITHMS = (
    AlgorithmInfo("chain", chain, "adds from rank to rank", "long vectors"),
    AlgorithmInfo("binomial", binomial_tree, "reduces up a binomial tree", "short vectors, few lossy steps"),
)
