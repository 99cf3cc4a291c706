"""Run under mpirun: measure the memory of a large broadcast, and what it allocates after a warm-up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp.device import get_device

WORLD = MPI.COMM_WORLD
CHUNK = 1 << 20
MEGABYTE = 1 << 20


def most_resident() -> int:
    """Return the peak resident size of the process in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def broadcast(comm: Communicator, values: np.ndarray) -> dict[str, int]:
    """Broadcast once; return what it allocated."""
    pool = get_device("host").pool
    before, resident = pool.statistics, most_resident()
    comm.Bcast(values, algorithm="chain")
    after = pool.statistics
    return {
        "pool": after.in_use + after.retained,
        "in use": after.in_use - before.in_use,
        "allocations": after.allocations - before.allocations,
        "grown": most_resident() - resident,
    }


def main(megabytes: int) -> None:
    found = {}
    values = np.resize(np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype(np.float32), megabytes * MEGABYTE // 4)
    for codec in ("none", "split", "bound:rel=1e-3"):
        with Communicator(WORLD, codec, chunk=CHUNK) as comm:
            broadcast(comm, values[: 32 * MEGABYTE // 4])
            found[codec] = WORLD.gather(broadcast(comm, values))
    if WORLD.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
