"""Allgather: every rank's block to all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.common import RINGS, AlgorithmInfo, doublings, node_leaders, power_of_two, runs
from mpi_gpucomp.schedule.builder import i, o

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpi_gpucomp.schedule.builder import ScheduleBuilder

__all__ = ["ALGORITHMS"]


def ring(builder: ScheduleBuilder) -> None:
    """Pass the blocks around two rings, half of each block around each."""
    ranks = builder.ranks
    builder.chunks = RINGS * ranks
    for rank in range(ranks):
        builder.local_copy(rank, i(0), o(rank * RINGS), RINGS)
    for channel in range(RINGS):
        for step in range(ranks - 1):
            with builder.round():
                for rank in range(ranks):
                    chunk = o((rank - step) % ranks * RINGS + channel)
                    builder.copy(rank, chunk if step else i(channel), (rank + 1) % ranks, chunk, channel=channel)


def recursive_doubling(builder: ScheduleBuilder) -> None:
    """Exchange all blocks held so far with the rank at distance 1, 2, 4, ..."""
    core = power_of_two(builder.ranks)
    held = [{rank} for rank in range(builder.ranks)]
    _copy_own_block(builder)
    for extra in range(core, builder.ranks):
        _send(builder, extra, extra - core, [extra])
        held[extra - core].add(extra)
    for distance in doublings(core):
        with builder.round():
            for rank in range(core):
                _send(builder, rank, rank ^ distance, held[rank])
        held[:core] = [held[rank] | held[rank ^ distance] for rank in range(core)]
    for extra in range(core, builder.ranks):
        _send(builder, extra - core, extra, held[extra - core] - {extra})


def bruck(builder: ScheduleBuilder) -> None:
    """Collect the blocks of the next 1, 2, 4, ... ranks: ceil(log2 n) rounds for any number of ranks."""
    _copy_own_block(builder)
    for distance in doublings(builder.ranks):
        with builder.round():
            for rank in range(builder.ranks):
                count = min(distance, builder.ranks - distance)
                blocks = ((rank + step) % builder.ranks for step in range(count))
                _send(builder, rank, (rank - distance) % builder.ranks, blocks)


def two_level(builder: ScheduleBuilder) -> None:
    """Gather in each node, pass the nodes' blocks around a ring of leaders, and along each node."""
    nodes = node_leaders(builder)
    _copy_own_block(builder)
    for node in nodes:
        for member in node[1:]:
            _send(builder, member, node[0], [member])
    for node in nodes:
        _forward_along(builder, node, node)
    for step in range(len(nodes) - 1):
        with builder.round():
            for at, node in enumerate(nodes):
                _send(builder, node[0], nodes[(at + 1) % len(nodes)][0], nodes[(at - step) % len(nodes)])
        for at, node in enumerate(nodes):
            _forward_along(builder, node, nodes[(at - step - 1) % len(nodes)])


def _forward_along(builder: ScheduleBuilder, node: list[int], blocks: list[int]) -> None:
    for at, member in enumerate(node[1:]):
        _send(builder, node[at], member, set(blocks) - {member})


def _copy_own_block(builder: ScheduleBuilder) -> None:
    for rank in range(builder.ranks):
        builder.local_copy(rank, i(0), o(rank))


def _send(builder: ScheduleBuilder, sender: int, receiver: int, blocks: Iterable[int]) -> None:
    """Send blocks in as few messages as possible; a rank's own block alone is read from its input."""
    for first, count in runs(blocks):
        source = i(0) if (first, count) == (sender, 1) else o(first)
        builder.copy(sender, source, receiver, o(first), count)


ALGORITHMS = (
    AlgorithmInfo("ring", ring, "passes the blocks around two rings", "long blocks"),
    AlgorithmInfo(
        "recursive_doubling",
        recursive_doubling,
        "exchanges all blocks held so far",
        "short blocks, ranks a power of two",
    ),
    AlgorithmInfo("bruck", bruck, "collects from the next 1, 2, 4, ... ranks", "short blocks"),
    AlgorithmInfo(
        "two_level", two_level, "gathers in nodes, a ring of leaders", "several ranks per node", two_level=True
    ),
)
