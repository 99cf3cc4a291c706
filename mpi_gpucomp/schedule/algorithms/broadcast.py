"""Broadcast: the root's vector to all. Built in place, and for rank 0 as the root unless the builder names nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.common import AlgorithmInfo, binomial, forward_along, node_leaders
from mpi_gpucomp.schedule.builder import o

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.builder import ScheduleBuilder

__all__ = ["ALGORITHMS"]


def chain(builder: ScheduleBuilder) -> None:
    """Forward each chunk from rank to rank."""
    forward_along(builder, range(builder.ranks), 0)


def tree(builder: ScheduleBuilder) -> None:
    """Forward each chunk down a binary tree."""
    for child in range(1, builder.ranks):
        builder.copy((child - 1) // 2, o(0), child, o(0))


def binomial_tree(builder: ScheduleBuilder) -> None:
    """Send the chunk, in each round, from every rank that has it to one that does not."""
    for edges in binomial(builder.ranks):
        for parent, child, _ in edges:
            builder.copy(parent, o(0), child, o(0))


def scatter_allgather(builder: ScheduleBuilder) -> None:
    """Scatter the vector down a binomial tree, then allgather it around a ring."""
    ranks = builder.ranks
    builder.chunks = ranks
    has = [{rank} for rank in range(ranks)]
    has[0] = set(range(ranks))
    for edges in binomial(ranks):
        for parent, child, size in edges:
            builder.copy(parent, o(child), child, o(child), size)
            has[child] |= set(range(child, child + size))
    for step in range(ranks - 1):
        with builder.round():
            for rank in range(ranks):
                chunk, after = (rank - step) % ranks, (rank + 1) % ranks
                if chunk not in has[after]:
                    builder.copy(rank, o(chunk), after, o(chunk))


def two_level(builder: ScheduleBuilder) -> None:
    """Forward each chunk along a chain of node leaders, and from each leader along its node."""
    nodes = node_leaders(builder)
    forward_along(builder, [node[0] for node in nodes], 0)
    for node in nodes:
        forward_along(builder, node, 0)


ALGORITHMS = (
    AlgorithmInfo("chain", chain, "forwards chunks from rank to rank", "long vectors"),
    AlgorithmInfo("tree", tree, "forwards chunks down a binary tree", "long vectors, many ranks"),
    AlgorithmInfo("binomial", binomial_tree, "doubles the ranks that have the data in each round", "short vectors"),
    AlgorithmInfo(
        "scatter_allgather", scatter_allgather, "scatter, then allgather around a ring", "long vectors, few chunks"
    ),
    AlgorithmInfo(
        "two_level",
        two_level,
        "a chain of node leaders, then a chain in each node",
        "several ranks per node",
        two_level=True,
    ),
)
