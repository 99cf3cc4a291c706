"""Whether long messages between nodes may be cut into pieces, and how long those are."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import config
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.monitor import settings
from mpi_gpucomp.monitor.detector import attach, ignore_messages
from mpi_gpucomp.monitor.process_monitor import process_monitor
from mpi_gpucomp.transport.gpu_aware import cuda_aware
from mpi_gpucomp.transport.segmented import SEGMENT_BYTES, Segmentation

if TYPE_CHECKING:
    from mpi_gpucomp.engine.engine import Engine
    from mpi_gpucomp.monitor.detector import AnomalyDetector

__all__ = ["Nodes", "agreed_cut", "attach_monitor", "nodes_of", "offset_to_first", "processor", "world_ranks"]


def agreed_cut(comm: MPI.Intracomm) -> Segmentation | None:
    """Let all ranks agree on the shortest piece that one of them has set; None: messages stay whole."""
    # From a GPU's memory MPI would copy each piece by itself, and wait for that.
    setting, got = config.SEGMENT_BYTES, ""
    try:
        wanted = setting.get()
    except SpecError as error:
        wanted, got = -1, error.got
    if wanted is None:
        wanted = 0 if cuda_aware().aware else SEGMENT_BYTES
    pieces = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([wanted], np.int64), pieces)
    if pieces.min() < 0:
        raise setting.error(got or f"an invalid value on rank {pieces.argmin()}", rank=comm.rank)
    return Segmentation(int(pieces.min())) if pieces.min() else None


# How the ranks of a communicator lie on nodes.

Nodes = tuple[tuple[int, ...], ...]


def processor() -> str:
    """Return the name of the machine that this rank runs on."""
    return MPI.Get_processor_name()


def nodes_of(comm: MPI.Intracomm) -> Nodes:
    """Let all ranks find out which of them share a machine: the ranks of each, in the order of the first."""
    # Eight bytes of each rank instead of its name: one short message, whatever the names are like.
    own = np.frombuffer(blake2b(processor().encode(), digest_size=8).digest(), np.int64)
    marks = np.empty(comm.size, np.int64)
    comm.Allgather(own, marks)
    found: dict[int, list[int]] = {}
    for rank, mark in enumerate(marks.tolist()):
        found.setdefault(mark, []).append(rank)
    return tuple(map(tuple, found.values()))


# Attaches the monitor to an engine, and measures by how much the ranks' clocks differ.

ROUNDS = 8
TAG = 0
_clocks: list[tuple[int, int]] = []
"""What was measured with the first communicator of all ranks of the world."""


def attach_monitor(engine: Engine, comm: MPI.Intracomm, wanted: bool | None) -> AnomalyDetector | None:
    """Let the process's monitor observe an engine, if it is enabled; all ranks call it, whatever each of them wants."""
    if not _clocks and comm.size == MPI.COMM_WORLD.size:
        _clocks.append(offset_to_first(comm))
    chosen = settings.read()
    if not (chosen.on if wanted is None else wanted):
        ignore_messages(engine)
        return None
    world = MPI.COMM_WORLD
    process = process_monitor(replace(chosen, on=True), world.rank, world.size)
    if _clocks:
        process.set_clock(*_clocks[0])
    return attach(engine, world_ranks(comm), process)


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
