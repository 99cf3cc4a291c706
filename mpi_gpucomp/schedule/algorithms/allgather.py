"""All-gather: every rank's block to all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.broadcast import leaders
from mpi_gpucomp.schedule.algorithms.info import RINGS, AlgorithmInfo, doublings, runs
from mpi_gpucomp.schedule.builder import i, o

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpi_gpucomp.schedule.builder import ScheduleBuilder

__all__ = ["ALGORITHMS"]


def ring(plan: ScheduleBuilder) -> None:
    """Pass the blocks around rings, a part of each block around each."""
    ranks = plan.ranks
    plan.cut(RINGS * ranks)
    for rank in range(ranks):
        plan.local_copy(rank, i(0), o(rank * RINGS), RINGS)
    for channel in range(RINGS):
        for step in range(ranks - 1):
            with plan.round():
                for rank in range(ranks):
                    chunk = o((rank - step) % ranks * RINGS + channel)
                    plan.copy(rank, chunk if step else i(channel), (rank + 1) % ranks, chunk, channel=channel)


def recursive_doubling(plan: ScheduleBuilder) -> None:
    """Exchange all that is known with a rank at distance 1, 2, 4, ..."""
    core = 1 << plan.ranks.bit_length() - 1
    known = [{rank} for rank in range(plan.ranks)]
    _keep_own(plan)
    for extra in range(core, plan.ranks):
        _send(plan, extra, extra - core, [extra])
        known[extra - core].add(extra)
    for distance in doublings(core):
        with plan.round():
            for rank in range(core):
                _send(plan, rank, rank ^ distance, known[rank])
        known[:core] = [known[rank] | known[rank ^ distance] for rank in range(core)]
    for extra in range(core, plan.ranks):
        _send(plan, extra - core, extra, known[extra - core] - {extra})


def bruck(plan: ScheduleBuilder) -> None:
    """Collect the blocks of the next 1, 2, 4, ... ranks, for any number of ranks in the fewest rounds."""
    _keep_own(plan)
    for distance in doublings(plan.ranks):
        with plan.round():
            for rank in range(plan.ranks):
                count = min(distance, plan.ranks - distance)
                blocks = ((rank + step) % plan.ranks for step in range(count))
                _send(plan, rank, (rank - distance) % plan.ranks, blocks)


def two_level(plan: ScheduleBuilder) -> None:
    """Gather in each node, pass the nodes' blocks around a ring of nodes, and along each node."""
    nodes = leaders(plan)
    _keep_own(plan)
    for node in nodes:
        for member in node[1:]:
            _send(plan, member, node[0], [member])
    for node in nodes:
        _pass_along(plan, node, node)
    for step in range(len(nodes) - 1):
        with plan.round():
            for at, node in enumerate(nodes):
                _send(plan, node[0], nodes[(at + 1) % len(nodes)][0], nodes[(at - step) % len(nodes)])
        for at, node in enumerate(nodes):
            _pass_along(plan, node, nodes[(at - step - 1) % len(nodes)])


def _pass_along(plan: ScheduleBuilder, node: list[int], blocks: list[int]) -> None:
    for at, member in enumerate(node[1:]):
        _send(plan, node[at], member, set(blocks) - {member})


def _keep_own(plan: ScheduleBuilder) -> None:
    for rank in range(plan.ranks):
        plan.local_copy(rank, i(0), o(rank))


def _send(plan: ScheduleBuilder, sender: int, receiver: int, blocks: Iterable[int]) -> None:
    """Send blocks in as few messages as they allow; the own block alone comes straight from the input."""
    for first, count in runs(blocks):
        source = i(0) if (first, count) == (sender, 1) else o(first)
        plan.copy(sender, source, receiver, o(first), count)


ALGORITHMS = (
    AlgorithmInfo("ring", ring, "passes the blocks around rings", "long blocks"),
    AlgorithmInfo(
        "recursive_doubling", recursive_doubling, "exchanges all that is known", "short blocks, ranks a power of two"
    ),
    AlgorithmInfo("bruck", bruck, "collects from 1, 2, 4, ... ranks on", "short blocks"),
    AlgorithmInfo(
        "two_level", two_level, "gathers in nodes, a ring of nodes", "several ranks per node", two_level=True
    ),
)
