"""Gather: every rank's block to the root."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.info import AlgorithmInfo, binomial, runs
from mpi_gpucomp.schedule.builder import i, o, s

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.builder import ScheduleBuilder

__all__ = ["ALGORITHMS"]


def linear(plan: ScheduleBuilder) -> None:
    """Send every block to the root."""
    plan.local_copy(plan.root, i(0), o(plan.root))
    for rank in range(plan.ranks):
        if rank != plan.root:
            plan.copy(rank, i(0), plan.root, o(rank))


def binomial_tree(plan: ScheduleBuilder) -> None:
    """Collect blocks up a binomial tree whose ranks are counted from the root; scratch begins with the own block."""
    plan.local_copy(plan.root, i(0), o(plan.root))
    started = {0}
    for edges in reversed(list(binomial(plan.ranks))):
        for parent, child, size in edges:
            if parent not in started:
                plan.local_copy(_rank(plan, parent), i(0), s(0))
                started.add(parent)
            _hand_up(plan, parent, child, size)


def _hand_up(plan: ScheduleBuilder, parent: int, child: int, size: int) -> None:
    sender, receiver = _rank(plan, child), _rank(plan, parent)
    if parent:
        plan.copy(sender, i(0) if size == 1 else s(0), receiver, s(child - parent), size)
        return
    for first, count in runs(_rank(plan, child + step) for step in range(size)):
        skipped = (first - sender) % plan.ranks
        plan.copy(sender, i(0) if size == 1 else s(skipped), receiver, o(first), count)


def _rank(plan: ScheduleBuilder, from_root: int) -> int:
    return (from_root + plan.root) % plan.ranks


ALGORITHMS = (
    AlgorithmInfo("linear", linear, "sends every block to the root", "long blocks, or of different lengths"),
    AlgorithmInfo("binomial", binomial_tree, "collects up a binomial tree", "short blocks"),
)
