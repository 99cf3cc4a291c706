"""Run under mpirun: ranks call a collective with different arguments; every rank reports its error."""

from __future__ import annotations

import json

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator, GpucompError

WORLD = MPI.COMM_WORLD
ODD = WORLD.rank == 1


def zeros(count: int, dtype: str = "f4") -> np.ndarray:
    return np.zeros(count, dtype)


CALLS = {
    "count": lambda comm, n: comm.Bcast(zeros(n + ODD)),
    "dtype": lambda comm, n: (
        comm.Allreduce(zeros(n), zeros(n)) if not ODD else comm.Allreduce(zeros(n, "f8"), zeros(n, "f8"))
    ),
    "root": lambda comm, n: comm.Bcast(zeros(n), root=int(ODD)),
    "operation": lambda comm, n: comm.Allreduce(zeros(n), zeros(n), MPI.MAX if ODD else MPI.SUM),
    "codec": lambda comm, n: comm.Bcast(zeros(n), codec="mpc" if ODD else "zfp:rate=16"),
    "algorithm": lambda comm, n: comm.Bcast(zeros(n), algorithm="tree" if ODD else "chain"),
    "collective": lambda comm, n: comm.Bcast(zeros(n)) if ODD else comm.Allreduce(zeros(n), zeros(n)),
    "refused": lambda comm, n: comm.Bcast(zeros(n, "i4" if ODD else "f4"), codec="split"),
    "named": lambda comm, n: comm.Iallreduce(zeros(n), zeros(n), name="grad.1", chunk=40_000 if ODD else None).Wait(),
    "started": lambda comm, n: comm.Iallgather(zeros(n + ODD), zeros(3 * (n + ODD)), algorithm="ring").Wait(),
}


def error_of(comm: Communicator, call: object, count: int) -> str:
    try:
        call(comm, count)
        return "no error"
    except GpucompError as error:
        return f"{type(error).__name__}: {error}"


def is_usable(comm: Communicator) -> bool:
    for count in (10, 100_000):
        values = np.full(count, WORLD.rank, np.float32)
        comm.Bcast(values, 2)
        if not (values == 2).all():
            return False
    return True


def main() -> None:
    errors = {}
    with Communicator(WORLD, codec="split") as comm:
        for count in (1000, 50_000):
            for name, call in CALLS.items():
                errors[f"{name} {count}"] = error_of(comm, call, count)
        errors["usable"] = is_usable(comm)
    by_rank = WORLD.gather(errors)
    if WORLD.rank == 0:
        print(json.dumps(by_rank))


if __name__ == "__main__":
    main()
