"""Run under mpirun: ranks call a collective in different ways, and each prints the error that it gets."""

from __future__ import annotations

import sys

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import AgreementError, BufferError, Communicator

RANK = MPI.COMM_WORLD.rank
CALLS = {
    "count": lambda comm: comm.Bcast(np.zeros(1000 + (RANK == 1), np.float32)),
    "dtype": lambda comm: comm.Allreduce(*np.zeros((2, 1000), "f8" if RANK == 1 else "f4")),
    "root": lambda comm: comm.Bcast(np.zeros(1000, np.float32), root=int(RANK == 1)),
    "codec": lambda comm: comm.Bcast(np.zeros(1000, np.float32), codec="mpc" if RANK == 1 else "split"),
    "algorithm": lambda comm: comm.Bcast(np.zeros(1000, np.float32), algorithm="tree" if RANK == 1 else "chain"),
    "bad buffer": lambda comm: comm.Bcast(np.zeros(1000, "i4" if RANK == 1 else "f4")),
}

comm = Communicator(MPI.COMM_WORLD, codec="split")
for name, call in CALLS.items():
    try:
        call(comm)
        print(f"{RANK}: {name}: no error")
    except (AgreementError, BufferError) as error:
        print(f"{RANK}: {name}: {type(error).__name__}: {error}")
values = np.full(1000, RANK, np.float32)
comm.Bcast(values, 2)
print(f"{RANK}: still usable: {values.sum():g}")
comm.Free()
sys.stdout.flush()
