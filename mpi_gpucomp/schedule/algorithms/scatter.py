"""Scatter: the root's blocks, one to each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.info import AlgorithmInfo, binomial, runs
from mpi_gpucomp.schedule.builder import i, o, s

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.builder import ScheduleBuilder

__all__ = ["ALGORITHMS"]


def linear(plan: ScheduleBuilder) -> None:
    """Send every block from the root."""
    plan.local_copy(plan.root, i(plan.root), o(0))
    for rank in range(plan.ranks):
        if rank != plan.root:
            plan.copy(plan.root, i(rank), rank, o(0))


def binomial_tree(plan: ScheduleBuilder) -> None:
    """Hand blocks down a binomial tree whose ranks are counted from the root; scratch begins with the own block."""
    plan.local_copy(plan.root, i(plan.root), o(0))
    relays = set()
    for edges in binomial(plan.ranks):
        for parent, child, size in edges:
            _hand_down(plan, parent, child, size)
            if size > 1:
                relays.add(child)
    for relay in sorted(relays):
        plan.local_copy(_rank(plan, relay), s(0), o(0))


def _hand_down(plan: ScheduleBuilder, parent: int, child: int, size: int) -> None:
    sender, receiver = _rank(plan, parent), _rank(plan, child)
    if parent:
        plan.copy(sender, s(child - parent), receiver, o(0) if size == 1 else s(0), size)
        return
    for first, count in runs(_rank(plan, child + step) for step in range(size)):
        skipped = (first - receiver) % plan.ranks
        plan.copy(sender, i(first), receiver, o(0) if size == 1 else s(skipped), count)


def _rank(plan: ScheduleBuilder, from_root: int) -> int:
    return (from_root + plan.root) % plan.ranks


ALGORITHMS = (
    AlgorithmInfo("linear", linear, "sends every block from the root", "long blocks, or of different lengths"),
    AlgorithmInfo("binomial", binomial_tree, "hands down a binomial tree", "short blocks"),
)
