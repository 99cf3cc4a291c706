"""Allreduce: the sum of all vectors to all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.common import (
    RINGS,
    AlgorithmInfo,
    PartialSums,
    doublings,
    forward_along,
    node_leaders,
    power_of_two,
    single_rank,
)
from mpi_gpucomp.schedule.builder import o

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.schedule.builder import ScheduleBuilder

__all__ = ["ALGORITHMS"]


def ring(builder: ScheduleBuilder) -> None:
    """Reduce-scatter around two rings, then allgather around them."""
    builder.chunks = RINGS * builder.ranks
    sums = PartialSums(builder)
    for channel in range(RINGS):
        _ring(builder, sums, range(builder.ranks), channel)
    single_rank(builder)


def _ring(builder: ScheduleBuilder, sums: PartialSums, group: Sequence[int], channel: int = 0) -> None:
    size = len(group)
    first = channel * size
    sums.ring(group, first, channel)
    for step in range(size - 1):
        with builder.round():
            for at in range(size):
                chunk = o(first + (at - step) % size)
                builder.copy(group[at], chunk, group[(at + 1) % size], chunk, channel=channel)


def recursive_doubling(builder: ScheduleBuilder) -> None:
    """Exchange and add whole vectors with the rank at distance 1, 2, 4, ..."""
    core = power_of_two(builder.ranks)
    sums = PartialSums(builder)
    sums.fold(core, 1)
    for distance in doublings(core):
        sums.add(*((rank, rank ^ distance, 0, 1) for rank in range(core)))
    _unfold(builder, core)
    single_rank(builder)


def reduce_scatter_allgather(builder: ScheduleBuilder) -> None:
    """Reduce-scatter by recursive halving, then allgather by recursive doubling."""
    core = power_of_two(builder.ranks)
    builder.chunks = core
    sums = PartialSums(builder)
    sums.fold(core, core)
    for distance in reversed(doublings(core)):
        sums.add(*sums.halve(core, distance, 0, core))
    for distance in doublings(core):
        with builder.round():
            for rank in range(core):
                held = o(rank & -distance)
                builder.copy(rank, held, rank ^ distance, held, distance)
    _unfold(builder, core)
    single_rank(builder)


def tree(builder: ScheduleBuilder) -> None:
    """Reduce up a binary tree, and broadcast the sum down it."""
    sums = PartialSums(builder)
    for child in reversed(range(1, builder.ranks)):
        sums.add((child, (child - 1) // 2, 0, 1))
    for child in range(1, builder.ranks):
        builder.copy((child - 1) // 2, o(0), child, o(0))
    single_rank(builder)


def two_level(builder: ScheduleBuilder) -> None:
    """Reduce along a chain in each node, allreduce around a ring of leaders, and broadcast along each node."""
    nodes = node_leaders(builder)
    builder.chunks = len(nodes)
    sums = PartialSums(builder)
    for node in nodes:
        for chunk in range(builder.chunks):
            for at in reversed(range(1, len(node))):
                sums.add((node[at], node[at - 1], chunk, 1))
    _ring(builder, sums, [node[0] for node in nodes])
    for chunk in range(builder.chunks):
        for node in nodes:
            forward_along(builder, node, chunk)
    single_rank(builder)


def _unfold(builder: ScheduleBuilder, core: int) -> None:
    """Send the result to the ranks beyond the power of two, which were folded into the others."""
    for extra in range(core, builder.ranks):
        builder.copy(extra - core, o(0), extra, o(0), builder.chunks)


ALGORITHMS = (
    AlgorithmInfo("ring", ring, "reduce-scatter and allgather around two rings", "long vectors"),
    AlgorithmInfo(
        "recursive_doubling", recursive_doubling, "exchanges whole vectors", "short vectors, few lossy steps"
    ),
    AlgorithmInfo(
        "reduce_scatter_allgather",
        reduce_scatter_allgather,
        "recursive halving, then doubling",
        "medium and long vectors",
    ),
    AlgorithmInfo("tree", tree, "reduces up a binary tree, broadcasts down", "long vectors, many ranks"),
    AlgorithmInfo(
        "two_level", two_level, "chains in nodes, a ring of leaders", "several ranks per node", two_level=True
    ),
)
