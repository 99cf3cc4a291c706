"""Gather: every rank's block to the root."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.common import AlgorithmInfo, absolute_rank, binomial, runs
from mpi_gpucomp.schedule.builder import i, o, s

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.builder import ScheduleBuilder

__all__ = ["ALGORITHMS"]


def linear(builder: ScheduleBuilder) -> None:
    """Send every block to the root."""
    builder.local_copy(builder.root, i(0), o(builder.root))
    for rank in range(builder.ranks):
        if rank != builder.root:
            builder.copy(rank, i(0), builder.root, o(rank))


def binomial_tree(builder: ScheduleBuilder) -> None:
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


ALGORITHMS = (
    AlgorithmInfo("linear", linear, "sends every block to the root", "long blocks, or blocks of different lengths"),
    AlgorithmInfo("binomial", binomial_tree, "gathers up a binomial tree", "short blocks"),
)
