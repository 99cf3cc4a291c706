"""Measures what a message costs the processors at its ends, as the engine sends and receives them.

On a slow wire the time of long messages tells nothing about processors. So chunks of few bytes go along a chain of all
ranks: one at a time shows how soon a rank notices what has come, many of them how much of a processor each takes. What
bytes cost is the time of the processor (not of a clock) that ranks spend which sleep between looks at a long message.
Ranks of the engine that wait for a message look for it often: these looks take some of the cores from the others.
"""

from __future__ import annotations

from resource import RUSAGE_SELF, getrusage
from time import perf_counter, sleep
from typing import TYPE_CHECKING

import numpy as np

from mpi_gpucomp.schedule.cost import Handling

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI

    from mpi_gpucomp.comm import Communicator

__all__ = ["handling"]

SINGLE, MANY = 20, 512
"""Messages of one chunk that are sent one after the other, and chunks of one message."""
ROUNDS = 3
LONG, PIECE = 1 << 22, 1 << 18
NAP = 2e-3
ITEM, CODED = 4, 512
"""Bytes of the shortest chunk, and of a short one that a codec takes."""
CODEC = "zfp:rate=8"


def handling(comm: MPI.Intracomm, latency: float, cores: float) -> tuple[Handling, float]:
    """Measure: all ranks do, together; they share so many cores, and a link has this latency.

    Return what a message costs, and how many cores are busy with looking for messages while ranks wait.
    """
    from mpi_gpucomp.comm import Communicator  # here, so that other commands run where there is no MPI

    many = np.ones(MANY * CODED // ITEM, np.float32)
    with Communicator(comm, CODEC, small=0, monitor=False) as ranks:
        coded = _median(comm, ROUNDS, lambda: ranks.Bcast(many, algorithm="chain", chunk=CODED)) / MANY
    with Communicator(comm, "none", small=0, monitor=False) as ranks:
        many = many[:MANY]
        together = _median(comm, ROUNDS, lambda: ranks.Bcast(many, algorithm="chain", chunk=ITEM)) / MANY
        alone = _median(comm, SINGLE, lambda: ranks.Bcast(many[:1], algorithm="chain"))
        used, spent = _used(comm, ranks)
    hops = comm.size - 1
    # Of each chunk a rank in the middle handles what it receives and what it sends, one after the other, and all ranks
    # together as many times as there are ends of hops.
    message = together / max(min(hops, 2), 2 * hops / cores)
    wait = max(0.0, alone / hops - latency - 2 * message)
    # The first rank encodes a chunk, and each of the others decodes it.
    frame = max(0.0, min((coded - together) / 2, (coded - together) * cores / comm.size))
    found = Handling(message, _per_byte(comm), wait, frame)
    handled = 2 * hops * LONG / PIECE * found.seconds(PIECE)
    return found, max(0.0, used - handled) / spent


def _used(comm: MPI.Intracomm, ranks: Communicator) -> tuple[float, float]:
    """Return the seconds of processors that a long message takes all ranks together, and those of a clock."""
    data = np.ones(LONG // ITEM, np.float32)
    comm.Barrier()
    start, used = perf_counter(), _processor()
    ranks.Bcast(data, algorithm="chain", chunk=PIECE)
    mine = _processor() - used, perf_counter() - start
    every = comm.allgather(mine)
    return sum(used for used, _ in every), max(spent for _, spent in every)


def _median(comm: MPI.Intracomm, rounds: int, run: Callable[[], object]) -> float:
    """Return the time of the slowest rank: the middle one of some, after one to warm up."""
    times: list[float] = []
    for _ in range(rounds + 1):
        comm.Barrier()
        start = perf_counter()
        run()
        times.append(max(comm.allgather(perf_counter() - start)))
    return sorted(times[1:])[rounds // 2]


def _per_byte(comm: MPI.Intracomm) -> float:
    """Return what a byte costs either end: the mean of both, from the first rank to the last."""
    ends = 0, comm.size - 1
    data = np.ones(LONG, np.uint8)
    spent = 0.0
    if comm.rank in ends:
        start = _processor()
        under_way = comm.Isend(data, ends[1]) if comm.rank == ends[0] else comm.Irecv(data, ends[0])
        looks = 1
        while not under_way.Test():
            sleep(NAP)
            looks += 1
        spent = _processor() - start - looks * _look(comm)
    total: float = sum(comm.allgather(max(0.0, spent)))
    return total / len(ends) / LONG


def _look(comm: MPI.Intracomm) -> float:
    """Return what it costs to look once, and find nothing."""
    start = _processor()
    for _ in range(50):
        comm.Iprobe()
        sleep(NAP / 10)
    return (_processor() - start) / 50


def _processor() -> float:
    used = getrusage(RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
