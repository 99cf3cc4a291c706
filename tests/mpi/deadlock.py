"""Run under mpirun: ranks that deadlock; every rank reports its error."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator, GpucompError

WORLD = MPI.COMM_WORLD
RANK = WORLD.rank


def error_of(work: object) -> str:
    try:
        work()
        return "no error"
    except GpucompError as error:
        return f"{type(error).__name__}: {error}"


def circle(comm: Communicator) -> str:
    """Wait for A before starting B, and on rank 1 the other way round."""
    first, second = ("B", "A") if RANK == 1 else ("A", "B")
    values = np.ones(1000, np.float32)

    def work() -> None:
        comm.Iallreduce(MPI.IN_PLACE, values, name=first).Wait()
        comm.Iallreduce(MPI.IN_PLACE, values, name=second).Wait()

    return error_of(work)


def absent(comm: Communicator) -> str:
    """Join on rank 1 after the others' timeout."""
    if RANK == 1:
        time.sleep(8)
    return error_of(lambda: comm.Bcast(np.ones(100_000, np.float32)))


def mixed(comm: Communicator) -> str:
    """Start a large call on rank 1 while the others are in a pass-through call."""
    values = np.ones(100, np.float32)
    comm.Allreduce(MPI.IN_PLACE, values)
    many = np.ones(100_000 if RANK == 1 else 100, np.float32)
    return error_of(lambda: comm.Allreduce(MPI.IN_PLACE, many))


def is_usable(comm: Communicator) -> bool:
    values = np.full(100_000, RANK, np.float32)
    comm.Bcast(values, 2)
    return bool((values == 2).all())


def main(case: str) -> None:
    comm = Communicator(WORLD, "split", timeout=0.3)
    found = [globals()[case](comm)]
    if case != "mixed":
        WORLD.Barrier()
        found.append(is_usable(comm))
        comm.Free()
    by_rank = WORLD.gather(found)
    if RANK == 0:
        print(json.dumps(by_rank))


if __name__ == "__main__":
    main(sys.argv[1])
