"""Run under mpirun: `auto` tries its ways in turns, also around a call in which the ranks disagree."""

from __future__ import annotations

import json

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator, GpucompError

WORLD = MPI.COMM_WORLD
WEIGHTS = np.random.default_rng(0).normal(0, 0.02, 1 << 19).astype(np.float32)


def arrives(comm: Communicator, root: int) -> bool:
    """Broadcast, and say whether everything has come."""
    values = WEIGHTS.copy() if WORLD.rank == root else np.zeros_like(WEIGHTS)
    comm.Bcast(values, root)
    return values.tobytes() == WEIGHTS.tobytes()


def heard(comm: Communicator) -> str:
    """Broadcast another count on one rank; return the error."""
    try:
        comm.Bcast(WEIGHTS[: WEIGHTS.size - (WORLD.rank == 1)].copy())
    except GpucompError as error:
        return type(error).__name__
    return "no error"


def sums(comm: Communicator) -> bool:
    """Add up before and after settling, where the way may have changed; say whether it was right each time."""
    values = np.full(1 << 19, WORLD.rank + 1, np.float32)
    right = []
    for settle in (False, True, False):
        total = np.zeros_like(values)
        if settle:
            comm.settle("Allreduce", values, total)
        comm.Allreduce(values, total)
        right.append(bool((total == WORLD.size * (WORLD.size + 1) / 2).all()))
    return all(right)


def main() -> None:
    """Print what each rank has seen."""
    with Communicator(WORLD) as comm:
        comm.tune("Bcast")
        right = [arrives(comm, root=0)]
        error = heard(comm)
        right += [arrives(comm, root) for root in range(WORLD.size)]
        comm.settle("Bcast", WEIGHTS.copy())
        right += [arrives(comm, root=1)]
        right += [sums(comm)]
        trials = comm._caller._tuner._trials.values()
        settled = [trial.settled for trial in trials]
        found = {"error": error, "right": all(right), "settled": settled, "left": [trial._left for trial in trials]}
    for rank, line in enumerate(WORLD.gather(json.dumps(found)) or ()):
        print(f"{rank} {line}", flush=True)


if __name__ == "__main__":
    main()
