"""Reduce and reduce-scatter: the sum of all vectors to the root, or one block of it to each rank.

The root of a reduce is rank 0 here (`builder.rotate` moves it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.common import (
    AlgorithmInfo,
    PartialSums,
    binomial,
    doublings,
    power_of_two,
    single_rank,
)
from mpi_gpucomp.schedule.builder import o

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.builder import ScheduleBuilder

__all__ = ["REDUCE", "REDUCE_SCATTER"]


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


REDUCE = (
    AlgorithmInfo("chain", chain, "adds from rank to rank", "long vectors"),
    AlgorithmInfo("binomial", binomial_tree, "reduces up a binomial tree", "short vectors, few lossy steps"),
)


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


REDUCE_SCATTER = (
    AlgorithmInfo("ring", ring, "reduces around a ring", "long vectors"),
    AlgorithmInfo(
        "halving",
        halving,
        "exchanges halves, quarters, ...",
        "short vectors, few lossy steps, ranks a power of two",
    ),
)
