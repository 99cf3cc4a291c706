"""Run under mpirun: a rank that is late or killed, or gets SIGUSR1; ranks write flight records.

flight_records.py CASE VICTIM
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


def stay_away(others: int) -> None:
    """Sleep until this number of ranks has written a record."""
    deadline = time.monotonic() + 60
    while len(list(FLIGHT.glob("flight.*.json"))) < others and time.monotonic() < deadline:
        time.sleep(0.05)


def main() -> None:
    values = np.zeros(1 << 20, np.float32)
    with Communicator(WORLD, "split") as comm:
        comm.Bcast(values)
        if CASE == "late-mpi":
            comm.Barrier()  # the first one is compared by the engine before it goes to MPI
        if CASE in ("late", "late-mpi") and WORLD.rank == VICTIM:
            stay_away(WORLD.size)
        if CASE == "late-mpi":
            comm.Barrier()
        if CASE == "asked":
            if WORLD.rank == VICTIM:
                stay_away(WORLD.size - 1)
            else:
                os.kill(os.getpid(), signal.SIGUSR1)
            WORLD.Barrier()  # inside MPI no Python signal handler runs
        comm.Bcast(values)
    print(f"rank {WORLD.rank} has completed", flush=True)


def die() -> None:
    values = np.zeros(1 << 24, np.float32)
    comm = Communicator(WORLD, "split")
    try:
        for number in range(100):
            if number == 3 and WORLD.rank == VICTIM:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.Bcast(values)
    except RankFailedError:
        os.write(1, f"rank {WORLD.rank} got the error\n".encode())
    sys.stdout.flush()
    time.sleep(1.0)
    os._exit(0)


if __name__ == "__main__":
    die() if CASE == "dead" else main()
