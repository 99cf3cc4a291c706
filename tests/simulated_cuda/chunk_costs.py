"""Counts what one chunk of a broadcast costs each rank: `chunk_costs.py CODEC CHUNK_BYTES CHUNKS`.

Rank 0 prints a JSON list with an object for each rank: what the simulated machine counted during a broadcast of several
chunks beyond what it counted during one of a single chunk, divided by the number of further chunks; and, as
`blocking_waits`, those of the whole broadcast: how many of them have to wait differs from run to run.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import cupy
import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator
from tests.simulated_cuda import machine

CODEC, CHUNK, CHUNKS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
COMM = MPI.COMM_WORLD


def broadcast(comm: Communicator, array: cupy.ndarray) -> Counter[str]:
    """Broadcast along a chain, and return the machine's counts."""
    COMM.Barrier()
    machine().reset_counts()
    comm.Bcast(array, root=0, codec=CODEC, chunk=CHUNK, algorithm="chain")
    return machine().counts()


def main() -> None:
    """Broadcast one chunk, then several, and print the difference."""
    values = np.sin(np.linspace(0, 99, CHUNK // 4 * CHUNKS)).astype(np.float32)  # every codec makes it shorter
    array = cupy.asarray(values) if COMM.rank == 0 else cupy.empty(values.size, np.float32)
    with Communicator(COMM) as comm:
        for _ in range(3):  # the first ones fill the pools
            broadcast(comm, array)
        one, several = broadcast(comm, array[: CHUNK // 4]), broadcast(comm, array)
    found = {name: (several[name] - one[name]) / (CHUNKS - 1) for name in several | one}
    everywhere = COMM.gather(found | {"blocking_waits": several["blocking_waits"]})
    if COMM.rank == 0:
        print(json.dumps(everywhere))


main()
