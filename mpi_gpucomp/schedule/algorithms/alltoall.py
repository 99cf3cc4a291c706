"""All-to-all: a block from every rank to every other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.info import AlgorithmInfo, doublings
from mpi_gpucomp.schedule.builder import i, o, s

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.builder import ScheduleBuilder
    from mpi_gpucomp.schedule.ir import Place

__all__ = ["ALGORITHMS"]


def pairwise(plan: ScheduleBuilder) -> None:
    """Exchange blocks in pairs; each round has pairs whose ranks add up to the same, so all meet once."""
    for total in range(plan.ranks):
        with plan.round():
            for rank in range(plan.ranks):
                other = (total - rank) % plan.ranks
                if other != rank:
                    plan.copy(rank, i(other), other, o(rank))
    for rank in range(plan.ranks):
        plan.local_copy(rank, i(rank), o(rank))


def bruck(plan: ScheduleBuilder) -> None:
    """Let blocks travel by the binary digits of their distance, all those with a digit in one message."""
    ranks = plan.ranks
    places: list[list[Place]] = [[i((rank + ahead) % ranks) for ahead in range(ranks)] for rank in range(ranks)]
    free = 0
    for distance in doublings(ranks):
        moving = [ahead for ahead in range(ranks) if ahead & distance]
        for rank in range(ranks):
            for slot, ahead in enumerate(moving):
                plan.local_copy(rank, places[rank][ahead], s(free + slot))
        arrival = free + len(moving)
        with plan.round():
            for rank in range(ranks):
                plan.copy(rank, s(free), (rank + distance) % ranks, s(arrival), len(moving))
        for slot, ahead in enumerate(moving):
            for rank in range(ranks):
                places[rank][ahead] = s(arrival + slot)
        free = arrival + len(moving)
    for rank in range(ranks):
        for ahead, place in enumerate(places[rank]):
            plan.local_copy(rank, place, o((rank - ahead) % ranks))


ALGORITHMS = (
    AlgorithmInfo("pairwise", pairwise, "exchanges blocks in pairs", "long blocks"),
    AlgorithmInfo("bruck", bruck, "relays blocks, many in a message", "short blocks, many ranks"),
)
