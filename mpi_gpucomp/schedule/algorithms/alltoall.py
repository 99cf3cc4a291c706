"""Alltoall: a block from every rank to every other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.algorithms.common import AlgorithmInfo, doublings
from mpi_gpucomp.schedule.builder import i, o, s

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.builder import ScheduleBuilder
    from mpi_gpucomp.schedule.ir import Place

__all__ = ["ALGORITHMS"]


def pairwise(builder: ScheduleBuilder) -> None:
    """Exchange blocks in pairs: round t pairs the ranks whose sum is t modulo n, so every pair meets once."""
    for total in range(builder.ranks):
        with builder.round():
            for rank in range(builder.ranks):
                other = (total - rank) % builder.ranks
                if other != rank:
                    builder.copy(rank, i(other), other, o(rank))
    for rank in range(builder.ranks):
        builder.local_copy(rank, i(rank), o(rank))


def bruck(builder: ScheduleBuilder) -> None:
    """Move blocks by the binary digits of their distance: one message per digit carries all blocks that have it set."""
    ranks = builder.ranks
    places: list[list[Place]] = [[i((rank + ahead) % ranks) for ahead in range(ranks)] for rank in range(ranks)]
    free = 0
    for distance in doublings(ranks):
        moving = [ahead for ahead in range(ranks) if ahead & distance]
        for rank in range(ranks):
            for slot, ahead in enumerate(moving):
                builder.local_copy(rank, places[rank][ahead], s(free + slot))
        arrival = free + len(moving)
        with builder.round():
            for rank in range(ranks):
                builder.copy(rank, s(free), (rank + distance) % ranks, s(arrival), len(moving))
        for slot, ahead in enumerate(moving):
            for rank in range(ranks):
                places[rank][ahead] = s(arrival + slot)
        free = arrival + len(moving)
    for rank in range(ranks):
        for ahead, place in enumerate(places[rank]):
            builder.local_copy(rank, place, o((rank - ahead) % ranks))


ALGORITHMS = (
    AlgorithmInfo("pairwise", pairwise, "exchanges blocks in pairs", "long blocks"),
    AlgorithmInfo("bruck", bruck, "relays blocks, many per message", "short blocks, many ranks"),
)
