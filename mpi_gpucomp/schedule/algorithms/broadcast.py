"""Broadcast: the root's vector to all. Built in place, and for rank 0 as the root unless the plan names nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.info import AlgorithmInfo, binomial
from mpi_gpucomp.schedule.builder import o

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.schedule.builder import ScheduleBuilder

__all__ = ["ALGORITHMS", "leaders", "pass_along"]


def chain(plan: ScheduleBuilder) -> None:
    """Pass each chunk from rank to rank."""
    pass_along(plan, range(plan.ranks), 0)


def pass_along(plan: ScheduleBuilder, members: Sequence[int], chunk: int) -> None:
    """Pass a chunk of the output from the first of some ranks along to the last."""
    for at, member in enumerate(members[1:]):
        plan.copy(members[at], o(chunk), member, o(chunk))


def tree(plan: ScheduleBuilder) -> None:
    """Pass each chunk from a rank to two others."""
    for child in range(1, plan.ranks):
        plan.copy((child - 1) // 2, o(0), child, o(0))


def binomial_tree(plan: ScheduleBuilder) -> None:
    """Let every rank that has the chunk send it, in each round to another."""
    for edges in binomial(plan.ranks):
        for parent, child, _ in edges:
            plan.copy(parent, o(0), child, o(0))


def scatter_allgather(plan: ScheduleBuilder) -> None:
    """Scatter the vector over the ranks by a binomial tree, then collect it around a ring."""
    ranks = plan.ranks
    plan.cut(ranks)
    has = [{rank} for rank in range(ranks)]
    has[0] = set(range(ranks))
    for edges in binomial(ranks):
        for parent, child, size in edges:
            plan.copy(parent, o(child), child, o(child), size)
            has[child] |= set(range(child, child + size))
    for step in range(ranks - 1):
        with plan.round():
            for rank in range(ranks):
                chunk, after = (rank - step) % ranks, (rank + 1) % ranks
                if chunk not in has[after]:
                    plan.copy(rank, o(chunk), after, o(chunk))


def two_level(plan: ScheduleBuilder) -> None:
    """Pass each chunk along one rank of every node, and from there along the node."""
    nodes = leaders(plan)
    pass_along(plan, [node[0] for node in nodes], 0)
    for node in nodes:
        pass_along(plan, node, 0)


def leaders(plan: ScheduleBuilder) -> list[list[int]]:
    """Return the nodes' ranks with each leader first, and the node of the root first, which leads it."""
    nodes = [sorted(node, key=lambda rank: (rank != plan.root, rank)) for node in plan.nodes]
    return sorted(nodes, key=lambda node: (node[0] != plan.root, node[0]))


ALGORITHMS = (
    AlgorithmInfo("chain", chain, "passes chunks from rank to rank", "long vectors"),
    AlgorithmInfo("tree", tree, "passes chunks down a binary tree", "long vectors, many ranks"),
    AlgorithmInfo("binomial", binomial_tree, "doubles the ranks that have it in each round", "short vectors"),
    AlgorithmInfo(
        "scatter_allgather", scatter_allgather, "scatters, then collects around a ring", "long vectors, few chunks"
    ),
    AlgorithmInfo(
        "two_level", two_level, "a chain of nodes, then a chain in each", "several ranks per node", two_level=True
    ),
)
