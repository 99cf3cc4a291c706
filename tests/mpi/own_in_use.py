"""Broadcasts by `auto` before and after it has found the best of MPI's own algorithms; prints which way they went."""

from __future__ import annotations

import json

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp._tuning import mpi_t as control
from mpi_gpucomp._tuning.mpi_algorithms import Better, Tuned, keeps_settings

STEM = "coll_tuned_bcast_algorithm"
WORLD = MPI.COMM_WORLD


def main() -> None:
    found: dict[str, object] = {"keeps": keeps_settings(), "better": []}
    comm = Communicator(WORLD, "none")
    straight = comm._caller.straight
    if keeps_settings():
        found["algorithm before"] = control.get(STEM)
        # Which algorithm is the fastest is the machine's affair: here it is whichever comes first behind the default.
        tuned = Tuned(WORLD, "bcast")
        tries = iter(range(1000))
        tuned.sweep(lambda on: abs(1 - next(tries) // 2))
        with tuned.best() as better:
            straight.improve("Bcast", Better(better, 1 << 16, 1 << 19))
            found |= used(comm, straight, better)
        found["algorithm outside"] = control.get(STEM)
        tuned.close()
        straight._kin.clear()
    if WORLD.rank == 0:
        print(json.dumps(found))
    WORLD.Barrier()
    comm.Free()


def used(comm: Communicator, straight: object, better: MPI.Intracomm) -> dict[str, object]:
    """Broadcast messages of several lengths; say where they went, and how many elements are wrong."""
    ways, wrong, call = [], 0, straight.call

    def watched(method: str, args: tuple[object, ...], on: MPI.Intracomm) -> object:
        ways.append("better" if on is better else "plain")
        return call(method, args, on)

    straight.call = watched
    for nbytes in (1 << 15, 1 << 16, 1 << 18, 1 << 19):
        values = np.arange(nbytes, dtype=np.uint8) if WORLD.rank == 0 else np.zeros(nbytes, np.uint8)
        comm.Bcast(values)
        wrong += int(np.count_nonzero(values != np.arange(nbytes, dtype=np.uint8)))
    straight.call = call
    return {"used": ways, "wrong": WORLD.allreduce(wrong)}


if __name__ == "__main__":
    main()
