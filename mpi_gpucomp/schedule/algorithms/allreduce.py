"""All-reduce: the sum of all vectors to all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.broadcast import leaders, pass_along
from mpi_gpucomp.schedule.algorithms.info import RINGS, AlgorithmInfo, doublings
from mpi_gpucomp.schedule.algorithms.partial_sums import Sums
from mpi_gpucomp.schedule.builder import i, o

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.schedule.builder import ScheduleBuilder

__all__ = ["ALGORITHMS"]


def ring(plan: ScheduleBuilder) -> None:
    """Add up each rank's chunks around rings, then pass the sums around them."""
    plan.cut(RINGS * plan.ranks)
    sums = Sums(plan)
    for channel in range(RINGS):
        _ring(plan, sums, range(plan.ranks), channel)
    _alone(plan)


def _ring(plan: ScheduleBuilder, sums: Sums, group: Sequence[int], channel: int = 0) -> None:
    size = len(group)
    first = channel * size
    sums.ring(group, first, channel)
    for step in range(size - 1):
        with plan.round():
            for at in range(size):
                chunk = o(first + (at - step) % size)
                plan.copy(group[at], chunk, group[(at + 1) % size], chunk, channel=channel)


def recursive_doubling(plan: ScheduleBuilder) -> None:
    """Exchange whole sums with a rank at distance 1, 2, 4, ..."""
    core = _core(plan)
    sums = Sums(plan)
    sums.fold(core, 1)
    for distance in doublings(core):
        sums.add(*((rank, rank ^ distance, 0, 1) for rank in range(core)))
    _unfold(plan, core)
    _alone(plan)


def reduce_scatter_allgather(plan: ScheduleBuilder) -> None:
    """Exchange halves, quarters, ... of the sums, then collect them the same way back."""
    core = _core(plan)
    plan.cut(core)
    sums = Sums(plan)
    sums.fold(core, core)
    for distance in reversed(doublings(core)):
        sums.add(*sums.halve(core, distance, 0, core))
    for distance in doublings(core):
        with plan.round():
            for rank in range(core):
                held = o(rank & -distance)
                plan.copy(rank, held, rank ^ distance, held, distance)
    _unfold(plan, core)
    _alone(plan)


def tree(plan: ScheduleBuilder) -> None:
    """Add up towards the root of a binary tree, and pass the sum down again."""
    sums = Sums(plan)
    for child in reversed(range(1, plan.ranks)):
        sums.add((child, (child - 1) // 2, 0, 1))
    for child in range(1, plan.ranks):
        plan.copy((child - 1) // 2, o(0), child, o(0))
    _alone(plan)


def two_level(plan: ScheduleBuilder) -> None:
    """Add up inside each node, around a ring of nodes, and pass the sums along the nodes."""
    nodes = leaders(plan)
    plan.cut(len(nodes))
    sums = Sums(plan)
    for node in nodes:
        for chunk in range(plan.chunks):
            for at in reversed(range(1, len(node))):
                sums.add((node[at], node[at - 1], chunk, 1))
    _ring(plan, sums, [node[0] for node in nodes])
    for chunk in range(plan.chunks):
        for node in nodes:
            pass_along(plan, node, chunk)
    _alone(plan)


def _core(plan: ScheduleBuilder) -> int:
    """Return the largest power of two among the ranks; the others hand in their vectors and get the sum."""
    return 1 << plan.ranks.bit_length() - 1


def _unfold(plan: ScheduleBuilder, core: int) -> None:
    for extra in range(core, plan.ranks):
        plan.copy(extra - core, o(0), extra, o(0), plan.chunks)


def _alone(plan: ScheduleBuilder) -> None:
    if plan.ranks == 1:
        plan.local_copy(0, i(0), o(0), plan.chunks)


ALGORITHMS = (
    AlgorithmInfo("ring", ring, "adds up and collects around a ring", "long vectors"),
    AlgorithmInfo("recursive_doubling", recursive_doubling, "exchanges whole sums", "short vectors, few lossy steps"),
    AlgorithmInfo(
        "reduce_scatter_allgather", reduce_scatter_allgather, "exchanges halves, and back", "medium and long vectors"
    ),
    AlgorithmInfo("tree", tree, "adds up a binary tree, and passes down", "long vectors, many ranks"),
    AlgorithmInfo("two_level", two_level, "chains in nodes, a ring of nodes", "several ranks per node", two_level=True),
)
