"""Broadcasts a number of bytes; rank 0 prints what each rank knows of its place.

`wait` in place of the number: says that all are there, and sleeps. `fail`: ends with exit code 7.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from time import sleep

import numpy as np
from mpi4py import MPI

WANTED = ("OSU_BENCH_", "MPI_GPUCOMP_", "OMPI_MCA_", "MPIR_CVAR_", "GLOO_", "PYTHONPATH")

world = MPI.COMM_WORLD
variables = {name: value for name, value in os.environ.items() if name.startswith(WANTED)}
places = world.gather((world.rank, socket.gethostname(), MPI.Get_library_version().split()[0], variables))
if sys.argv[1] == "wait":
    if world.rank == 0:
        print("there", flush=True)
    sleep(120)
elif sys.argv[1] == "fail":
    MPI.Finalize()
    sys.exit(7)
else:
    buffer = np.full(int(sys.argv[1]), 3 if world.rank == 0 else 0, np.uint8)
    world.Bcast(buffer)
    assert buffer.min() == 3
    if world.rank == 0:
        print(json.dumps(places), flush=True)
