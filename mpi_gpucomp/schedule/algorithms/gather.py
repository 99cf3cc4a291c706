"""Gather and scatter: every rank's block to the root, and the root's blocks, one to each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.common import AlgorithmInfo, absolute_rank, binomial, runs
from mpi_gpucomp.schedule.builder import i, o, s

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.builder import ScheduleBuilder

__all__ = ["GATHER", "SCATTER"]


def linear_gather(builder: ScheduleBuilder) -> None:
    """Send every block to the root."""
    builder.local_copy(builder.root, i(0), o(builder.root))
    for rank in range(builder.ranks):
        if rank != builder.root:
            builder.copy(rank, i(0), builder.root, o(rank))


def binomial_gather(builder: ScheduleBuilder) -> None:
    """Gather blocks up a binomial tree of ranks relative to the root; scratch starts with the rank's own block."""
    builder.local_copy(builder.root, i(0), o(builder.root))
    started = {0}
    for edges in reversed(list(binomial(builder.ranks))):
        for parent, child, size in edges:
            if parent not in started:
                builder.local_copy(absolute_rank(builder, parent), i(0), s(0))
                started.add(parent)
            _send_up(builder, parent, child, size)


def _send_up(builder: ScheduleBuilder, parent: int, child: int, size: int) -> None:
    sender, receiver = absolute_rank(builder, child), absolute_rank(builder, parent)
    if parent:
        builder.copy(sender, i(0) if size == 1 else s(0), receiver, s(child - parent), size)
        return
    for first, count in runs(absolute_rank(builder, child + step) for step in range(size)):
        offset = (first - sender) % builder.ranks
        builder.copy(sender, i(0) if size == 1 else s(offset), receiver, o(first), count)


GATHER = (
    AlgorithmInfo(
        "linear", linear_gather, "sends every block to the root", "long blocks, or blocks of different lengths"
    ),
    AlgorithmInfo("binomial", binomial_gather, "gathers up a binomial tree", "short blocks"),
)


def linear_scatter(builder: ScheduleBuilder) -> None:
    """Send every block from the root."""
    builder.local_copy(builder.root, i(builder.root), o(0))
    for rank in range(builder.ranks):
        if rank != builder.root:
            builder.copy(builder.root, i(rank), rank, o(0))


def binomial_scatter(builder: ScheduleBuilder) -> None:
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


SCATTER = (
    AlgorithmInfo(
        "linear", linear_scatter, "sends every block from the root", "long blocks, or blocks of different lengths"
    ),
    AlgorithmInfo("binomial", binomial_scatter, "scatters down a binomial tree", "short blocks"),
)
