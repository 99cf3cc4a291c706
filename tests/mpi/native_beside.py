"""Run under mpirun: native messages that need the sender's help while it waits in a collective over sockets."""

from __future__ import annotations

import faulthandler
import json

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator

ROUNDS, COUNT, MESSAGES = 3, 1 << 20, 64
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


def main() -> None:
    """Send to the next rank without waiting, join a collective, and only then complete the sends."""
    faulthandler.dump_traceback_later(60, exit=True)
    right = []
    with Communicator(WORLD.Dup(), "split") as comm:
        for number in range(ROUNDS):
            sent = [np.full(COUNT, RANK + number + n, np.int32) for n in range(2)]
            small = [np.full(4000, n, np.int32) for n in range(MESSAGES)]
            if RANK == 0:
                requests = [WORLD.Isend(one, 1) for one in [*small, *sent]]
            elif RANK == 1:
                received = [np.empty_like(one) for one in [*small, *sent]]
                for one in received:
                    WORLD.Recv(one, 0)
                right.append(all((one == one[0]).all() for one in received) and int(received[-1][0]) == number + 1)
            total = np.full(1000, RANK, np.float32)
            comm.Allreduce(MPI.IN_PLACE, total, algorithm="ring")
            right.append(bool((total == sum(range(SIZE))).all()))
            if RANK == 0:
                MPI.Request.Waitall(requests)
    found = WORLD.gather(right)
    if found is not None:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
