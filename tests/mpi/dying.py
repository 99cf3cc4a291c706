"""Run under mpirun: ranks that die, are stopped or interrupted, or end with an error; the others tell what they hear.

dying.py CASE VICTIM DIRECTORY: every rank leaves its process id in the directory when it is about to begin.
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

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator, GpucompError

WORLD = MPI.COMM_WORLD
RANK = WORLD.rank
LARGE = 16 << 20
"""Elements of a broadcast of 64 MB."""


def say(*words: object) -> None:
    """Print a line at once: whoever dies takes what is buffered along."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def heard(work: object) -> str:
    try:
        work()
        return "no error"
    except GpucompError as error:
        return f"{type(error).__name__}: {error}"


def after_messages(comm: Communicator, number: int, act: object) -> None:
    """Do something in the middle of a collective: at the message of this number that is sent or received."""
    transport, count = comm._caller.transport, [0]

    def counted(method: object) -> object:
        def call(*args: object) -> object:
            count[0] += 1
            if count[0] == number:
                act()
            return method(*args)

        return call

    transport.send, transport.receive = counted(transport.send), counted(transport.receive)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def large(comm: Communicator) -> None:
    """Broadcast 64 MB from rank 0, by a chain."""
    comm.Bcast(np.ones(LARGE, np.float32), 0, algorithm="chain")


def small(comm: Communicator) -> None:
    """Call MPI itself again and again, by the shortest way."""
    values = np.ones(1)
    for _ in range(100_000):
        comm.Bcast(values)


def started(comm: Communicator) -> None:
    """Wait for calls of MPI's own that were only started."""
    values = np.ones(1)
    for _ in range(100_000):
        comm.Ibcast(values).Wait()


def verify(comm: Communicator) -> str:
    """Use a communicator in every way: large and small, by the engine and by MPI."""
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
    """Let ranks die one after the other, in several kinds of calls, and go on without them."""
    for turn, kind in enumerate((large, started if victim % 2 else small)):
        verify(comm)
        dies = victim % comm.size
        if comm.rank == dies:
            if kind is large:
                after_messages(comm, 20, die)
            else:
                threading.Timer(0.2, die).start()
        say(f"{turn} {RANK} was {comm.rank}:", heard(partial(kind, comm)))
        again = heard(partial(large, comm))
        say(f"{turn} {RANK} again:", again.split(":")[0])
        comm = comm.Shrink()
        say(f"{turn} {RANK} is {comm.rank}:", verify(comm))
    comm.Free()


def killed(comm: Communicator, victim: int) -> None:
    """Let one rank die, in an MPI that does not survive it."""
    if victim == RANK:
        after_messages(comm, 20, die)
    large(comm)
    small(comm)


def stopped(comm: Communicator, victim: int) -> None:
    """Let one rank stand still, which MPI does not notice; the others end the job once all have heard of it."""
    if victim == RANK:
        after_messages(comm, 20, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    values = np.ones(LARGE, np.float32)
    say(f"{RANK}:", heard(lambda: comm.Allreduce(MPI.IN_PLACE, values, algorithm="ring")))
    directory = Path(sys.argv[3])
    (directory / f"{RANK}.heard").touch()
    while len([*directory.glob("*.heard")]) < WORLD.size - 1:
        time.sleep(0.05)
    WORLD.Abort(3)


def waiting(comm: Communicator, victim: int) -> None:
    """Let all wait for a rank that does not come; one of them is interrupted from outside."""
    if victim == RANK:
        time.sleep(100)
    comm.Iallreduce(MPI.IN_PLACE, np.ones(100_000, np.float32), name="weights").Wait()


def breaking_off(comm: Communicator, victim: int) -> None:
    """Let all wait for a rank that does not come; one of them is interrupted while the engine turns."""
    transport = comm._caller.transport

    def poll() -> object:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        return type(transport).recv_control(transport)

    if RANK == 1:
        transport.recv_control = poll
    waiting(comm, victim)


def busy(comm: Communicator, victim: int) -> None:
    """Work without end, until all are interrupted from outside."""
    while True:
        large(comm)
        comm.Allreduce(MPI.IN_PLACE, np.ones(1))


def raising(comm: Communicator, victim: int) -> None:
    """Let one rank end with an error before a collective that the others are in."""
    if victim == RANK:
        raise ValueError("a mistake here")
    say(f"{RANK}:", heard(lambda: large(comm)))


def forgetting(comm: Communicator, victim: int) -> None:
    """Let one rank start a collective and end without waiting for it."""
    values = np.full(1_000_000, RANK, np.float32)
    request = comm.Ibcast(values, victim, algorithm="chain")
    if victim != RANK:
        time.sleep(0.5)
        request.Wait()
        say(f"{RANK}:", "right" if (values == victim).all() else "wrong")


def main(case: str, victim: int, directory: Path) -> None:
    faulthandler.dump_traceback_later(100, exit=True)  # a rank that hangs shows where, and ends
    comm = Communicator(WORLD, codec="none", timeout=0.3 if case == "stopped" else 20.0)
    verify(comm)
    (directory / f"{RANK}.part").write_text(str(os.getpid()))
    (directory / f"{RANK}.part").rename(directory / f"{RANK}.pid")
    globals()[case](comm, victim)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
