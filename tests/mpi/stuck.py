"""Run under mpirun: ranks wait for each other in ways that no order of work can solve; each tells what it hears."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator, GpucompError

WORLD = MPI.COMM_WORLD
RANK = WORLD.rank


def heard(work: object) -> str:
    try:
        work()
        return "no error"
    except GpucompError as error:
        return f"{type(error).__name__}: {error}"


def circle(comm: Communicator) -> str:
    """Wait for A before B is started, and on rank 1 the other way round."""
    first, second = ("B", "A") if RANK == 1 else ("A", "B")
    values = np.ones(1000, np.float32)

    def work() -> None:
        comm.Iallreduce(MPI.IN_PLACE, values, name=first).Wait()
        comm.Iallreduce(MPI.IN_PLACE, values, name=second).Wait()

    return heard(work)


def absent(comm: Communicator) -> str:
    """Let rank 1 come later than the others wait."""
    if RANK == 1:
        time.sleep(8)
    return heard(lambda: comm.Bcast(np.ones(100_000, np.float32)))


def mixed(comm: Communicator) -> str:
    """Let rank 1 start something large while the others are in a small call of MPI's own."""
    values = np.ones(100, np.float32)
    comm.Allreduce(MPI.IN_PLACE, values)
    many = np.ones(100_000 if RANK == 1 else 100, np.float32)
    return heard(lambda: comm.Allreduce(MPI.IN_PLACE, many))


def usable(comm: Communicator) -> bool:
    values = np.full(100_000, RANK, np.float32)
    comm.Bcast(values, 2)
    return bool((values == 2).all())


def main(case: str) -> None:
    comm = Communicator(WORLD, "split", timeout=0.3)
    told = [globals()[case](comm)]
    if case != "mixed":
        WORLD.Barrier()
        told.append(usable(comm))
        comm.Free()
    everybody = WORLD.gather(told)
    if RANK == 0:
        print(json.dumps(everybody))


if __name__ == "__main__":
    main(sys.argv[1])
