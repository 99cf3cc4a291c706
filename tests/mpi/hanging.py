"""Run under mpirun: a rank that comes late, is dead, or is asked what it does; the others leave flight records.

hanging.py CASE VICTIM
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator, RankFailedError

WORLD = MPI.COMM_WORLD
CASE, VICTIM = sys.argv[1], int(sys.argv[2])
FLIGHT = Path(os.environ["MPI_GPUCOMP_FLIGHT"])


def be_elsewhere(others: int) -> None:
    """Stay away until all others have left a record."""
    deadline = time.monotonic() + 60
    while len(list(FLIGHT.glob("flight.*.json"))) < others and time.monotonic() < deadline:
        time.sleep(0.05)


def main() -> None:
    values = np.zeros(1 << 20, np.float32)
    with Communicator(WORLD, "split") as comm:
        comm.Bcast(values)
        if CASE in ("late", "late-mpi") and WORLD.rank == VICTIM:
            be_elsewhere(WORLD.size)
        if CASE == "late-mpi":
            comm.Barrier()
        if CASE == "asked":
            if WORLD.rank == VICTIM:
                be_elsewhere(WORLD.size - 1)
            else:
                os.kill(os.getpid(), signal.SIGUSR1)
            WORLD.Barrier()  # in MPI itself: no handler of Python's runs
        comm.Bcast(values)
    print(f"rank {WORLD.rank} ends well", flush=True)


def die() -> None:
    values = np.zeros(1 << 24, np.float32)
    comm = Communicator(WORLD, "split")
    try:
        for turn in range(100):
            if turn == 3 and WORLD.rank == VICTIM:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.Bcast(values)
    except RankFailedError:
        os.write(1, f"rank {WORLD.rank} hears of it\n".encode())
    sys.stdout.flush()
    time.sleep(1.0)
    os._exit(0)


if __name__ == "__main__":
    die() if CASE == "dead" else main()
