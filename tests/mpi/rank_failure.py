"""Run under mpirun: a rank is killed, stopped or interrupted, or exits with an error; the others report their errors.

rank_failure.py CASE VICTIM DIRECTORY    every rank writes its process id to the directory before it begins
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import faulty
import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator, GpucompError

WORLD = MPI.COMM_WORLD
RANK = WORLD.rank
LARGE = 16 << 20
"""Elements of a broadcast of 64 MB."""


def write_line(*words: object) -> None:
    """Print a line unbuffered: a killed process loses its buffers."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def error_of(work: object) -> str:
    try:
        work()
        return "no error"
    except GpucompError as error:
        return f"{type(error).__name__}: {error}"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def large(comm: Communicator) -> None:
    """Broadcast 64 MB from rank 0, by a chain."""
    comm.Bcast(np.ones(LARGE, np.float32), 0, algorithm="chain")


def small(comm: Communicator) -> None:
    """Make pass-through calls on the fast path."""
    values = np.ones(1)
    for _ in range(100_000):
        comm.Bcast(values)


def started(comm: Communicator) -> None:
    """Wait for non-blocking pass-through calls."""
    values = np.ones(1)
    for _ in range(100_000):
        comm.Ibcast(values).Wait()


def verify(comm: Communicator) -> str:
    """Run collectives large and small, in the engine and passed through, and verify them."""
    rank, size = comm.rank, comm.size
    for root in range(size):
        values = np.full(300_000, rank, np.float32)
        comm.Bcast(values, root, codec="split", algorithm="chain")
        sums = np.full(300_000, rank, np.float32)
        comm.Allreduce(MPI.IN_PLACE, sums, codec="split", algorithm="ring")
        one = np.full(1, rank, np.float64)
        comm.Bcast(one, root)
        if not (values == root).all() or not (sums == sum(range(size))).all() or one[0] != root:
            return "wrong"
    return f"right on {size} ranks"


def survive(comm: Communicator, victim: int) -> None:
    """Kill two ranks, each in another kind of call, and continue with the survivors."""
    for number, kind in enumerate((large, started if victim % 2 else small)):
        verify(comm)
        dies = victim % comm.size
        if comm.rank == dies:
            if kind is large:
                faulty.signal_after(comm, 20, signal.SIGKILL)
            else:
                threading.Timer(0.2, die).start()
        write_line(f"{number} {RANK} was {comm.rank}:", error_of(partial(kind, comm)))
        again = error_of(partial(large, comm))
        write_line(f"{number} {RANK} again:", again.split(":")[0])
        comm = comm.Shrink()
        write_line(f"{number} {RANK} is {comm.rank}:", verify(comm))
    comm.Free()


def killed(comm: Communicator, victim: int) -> None:
    """Kill a rank under an MPI that is not fault-tolerant."""
    if victim == RANK:
        faulty.signal_after(comm, 20, signal.SIGKILL)
    large(comm)
    small(comm)


def stopped(comm: Communicator, victim: int) -> None:
    """Stop a rank, which MPI does not notice; the others abort the job once all have an error."""
    if victim == RANK:
        faulty.signal_after(comm, 20, signal.SIGSTOP)
    values = np.ones(LARGE, np.float32)
    write_line(f"{RANK}:", error_of(lambda: comm.Allreduce(MPI.IN_PLACE, values, algorithm="ring")))
    directory = Path(sys.argv[3])
    (directory / f"{RANK}.reported").touch()
    while len([*directory.glob("*.reported")]) < WORLD.size - 1:
        time.sleep(0.05)
    WORLD.Abort(3)


def waiting(comm: Communicator, victim: int) -> None:
    """Wait for a rank that does not join; one of the waiting ranks is interrupted from outside."""
    if victim == RANK:
        time.sleep(100)
    comm.Iallreduce(MPI.IN_PLACE, np.ones(100_000, np.float32), name="weights").Wait()


def interrupted_in_poll(comm: Communicator, victim: int) -> None:
    """Wait for a rank that does not join; rank 1 is interrupted inside the progress engine."""
    wire = comm._runtime.wire

    def events() -> object:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        return type(wire).events(wire)

    if RANK == 1:
        wire.events = events
    waiting(comm, victim)


def busy(comm: Communicator, victim: int) -> None:
    """Run collectives until the job is interrupted from outside."""
    while True:
        large(comm)
        comm.Allreduce(MPI.IN_PLACE, np.ones(1))


def raising(comm: Communicator, victim: int) -> None:
    """Exit on one rank with an error before a collective that the others are in."""
    if victim == RANK:
        raise ValueError("a mistake here")
    write_line(f"{RANK}:", error_of(lambda: large(comm)))


def not_waited_for(comm: Communicator, victim: int) -> None:
    """Start a collective on one rank and exit without waiting for it."""
    values = np.full(1_000_000, RANK, np.float32)
    request = comm.Ibcast(values, victim, algorithm="chain")
    if victim != RANK:
        time.sleep(0.5)
        request.Wait()
        write_line(f"{RANK}:", "right" if (values == victim).all() else "wrong")


def main(case: str, victim: int, directory: Path) -> None:
    faulty.install()
    faulthandler.dump_traceback_later(100, exit=True)
    comm = Communicator(WORLD, codec="none", timeout=0.3 if case == "stopped" else 20.0)
    verify(comm)
    (directory / f"{RANK}.part").write_text(str(os.getpid()))
    (directory / f"{RANK}.part").rename(directory / f"{RANK}.pid")
    globals()[case](comm, victim)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
