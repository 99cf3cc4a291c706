"""Scatter: the root's blocks, one to each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.common import AlgorithmInfo, absolute_rank, binomial, runs
from mpi_gpucomp.schedule.builder import i, o, s

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.builder import ScheduleBuilder

__all__ = ["ALGORITHMS"]


def linear(builder: ScheduleBuilder) -> None:
    """Send every block from the root."""
    builder.local_copy(builder.root, i(builder.root), o(0))
    for rank in range(builder.ranks):
        if rank != builder.root:
            builder.copy(builder.root, i(rank), rank, o(0))


def binomial_tree(builder: ScheduleBuilder) -> None:
    """Scatter blocks down a binomial tree of ranks relative to the root; scratch starts with the rank's own block."""
    builder.local_copy(builder.root, i(builder.root), o(0))
    relays = set()
    for edges in binomial(builder.ranks):
        for parent, child, size in edges:
            _send_down(builder, parent, child, size)
            if size > 1:
                relays.add(child)
    for relay in sorted(relays):
        builder.local_copy(absolute_rank(builder, relay), s(0), o(0))


def _send_down(builder: ScheduleBuilder, parent: int, child: int, size: int) -> None:
    sender, receiver = absolute_rank(builder, parent), absolute_rank(builder, child)
    if parent:
        builder.copy(sender, s(child - parent), receiver, o(0) if size == 1 else s(0), size)
        return
    for first, count in runs(absolute_rank(builder, child + step) for step in range(size)):
        offset = (first - receiver) % builder.ranks
        builder.copy(sender, i(first), receiver, o(0) if size == 1 else s(offset), count)


ALGORITHMS = (
    AlgorithmInfo("linear", linear, "sends every block from the root", "long blocks, or blocks of different lengths"),
    AlgorithmInfo("binomial", binomial_tree, "scatters down a binomial tree", "short blocks"),
)
