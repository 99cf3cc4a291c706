"""Joins a communicator to the monitor of its process, and measures by how much the ranks' clocks differ."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from mpi_gpucomp.monitor import settings
from mpi_gpucomp.monitor.station import station

if TYPE_CHECKING:
    from mpi_gpucomp.monitor.recorder import Group
    from mpi_gpucomp.monitor.station import Station

__all__ = ["join_monitor", "offset_to_first", "world_ranks"]

ROUNDS = 8
TAG = 0
_clocks: list[tuple[int, int]] = []
"""What was measured with the first communicator of all ranks of the world."""


def join_monitor(comm: MPI.Intracomm, wanted: bool | None) -> tuple[Group | None, Station | None]:
    """Return what a communicator records with, if it does; all ranks call it, whatever each of them wants."""
    if not _clocks and comm.size == MPI.COMM_WORLD.size:
        _clocks.append(offset_to_first(comm))
    chosen = settings.read()
    if not (chosen.on if wanted is None else wanted):
        return None, None
    world = MPI.COMM_WORLD
    known = station(replace(chosen, on=True), world.rank, world.size)
    if _clocks:
        known.set_clock(*_clocks[0])
    return known.recorder.group(world_ranks(comm), comm.rank), known


def world_ranks(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks of the world that a communicator's ranks are; their own where they are not of this world."""
    found = comm.Get_group().Translate_ranks(range(comm.size), MPI.COMM_WORLD.Get_group())
    return [own if rank == MPI.UNDEFINED else rank for own, rank in enumerate(found)]


def offset_to_first(comm: MPI.Intracomm) -> tuple[int, int]:
    """Return what to add to this clock to get that of rank 0, and by how much that may be wrong: all ranks call it.

    In each round those who know ask as many who do not, so it takes as many rounds as a tree has levels.
    """
    offset = doubt = 0
    known = 1
    while known < comm.size:
        if comm.rank < known and comm.rank + known < comm.size:
            _answer(comm, comm.rank + known, offset, doubt)
        elif known <= comm.rank < 2 * known:
            offset, doubt = _ask(comm, comm.rank - known)
        known *= 2
    return offset, doubt


def _answer(comm: MPI.Intracomm, peer: int, offset: int, doubt: int) -> None:
    """Tell a peer the time, as often as it asks, and what is known of this clock."""
    word = np.zeros(3, np.int64)
    for _ in range(ROUNDS):
        comm.Recv(word[:1], peer, TAG)
        word[:] = perf_counter_ns(), offset, doubt
        comm.Send(word, peer, TAG)


def _ask(comm: MPI.Intracomm, peer: int) -> tuple[int, int]:
    """Ask for the time; the answer that came back fastest is the best."""
    word, best = np.zeros(3, np.int64), (0, 1 << 62)
    for _ in range(ROUNDS):
        sent = perf_counter_ns()
        comm.Send(word[:1], peer, TAG)
        comm.Recv(word, peer, TAG)
        back = perf_counter_ns()
        told, offset, doubt = word.tolist()
        if (back - sent) // 2 + doubt < best[1]:
            best = told + offset - (sent + back) // 2, (back - sent) // 2 + doubt
    return best
