"""What runs on each rank while faults are made: broadcasts, again and again."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LATE", "broadcast"]

LATE = "late"
"""The file that says so."""
DEBUG = "OSU_BENCH_DEBUG"
"""Names files, one for each rank, for what the ranks tell each other."""


def broadcast(directory: Path, seconds: float, codec: str) -> None:
    """Broadcast 16 MB again and again; the last rank comes late as long as a file says so."""
    from mpi4py import MPI

    from mpi_gpucomp import Communicator

    world = MPI.COMM_WORLD
    if os.environ.get(DEBUG):
        logging.basicConfig(filename=f"{os.environ[DEBUG]}.{world.rank}", level=logging.DEBUG)
    values = np.random.default_rng(0).normal(0, 0.02, 1 << 22).astype(np.float32)
    (directory / f"{world.rank}.pid").write_text(str(os.getpid()))
    with Communicator(world, codec) as comm:
        end, calls = time.monotonic() + seconds, 0
        while world.bcast(time.monotonic() < end):
            if world.rank == world.size - 1 and (directory / LATE).exists():
                time.sleep(0.2)
            comm.Bcast(values)
            calls += 1
    if world.rank == 0:
        print(f"# {calls} broadcasts", flush=True)
