"""Run under mpirun: broadcasts with a tuned communicator for a range of sizes; prints which communicator each used."""

from __future__ import annotations

import json

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp._tuning import mpi_t as control
from mpi_gpucomp._tuning.mpi_algorithms import AlgorithmSweep, TunedComm, keeps_settings

STEM = "coll_tuned_bcast_algorithm"
WORLD = MPI.COMM_WORLD


def main() -> None:
    found: dict[str, object] = {"keeps": keeps_settings(), "better": []}
    comm = Communicator(WORLD, "none")
    native = comm._runtime.native
    if keeps_settings():
        found["algorithm before"] = control.get(STEM)
        # The sweep's timings are replaced, so that the first algorithm after the default wins on every machine.
        tuned = AlgorithmSweep(WORLD, "bcast")
        tries = iter(range(1000))
        tuned.sweep(lambda on: abs(1 - next(tries) // 2))
        with tuned.best() as better:
            native.add_tuned_comm("Bcast", TunedComm(better, 1 << 16, 1 << 19))
            found |= used(comm, native, better)
        found["algorithm outside"] = control.get(STEM)
        tuned.close()
        native.derived_comms.clear()
    if WORLD.rank == 0:
        print(json.dumps(found))
    WORLD.Barrier()
    comm.Free()


def used(comm: Communicator, native: object, better: MPI.Intracomm) -> dict[str, object]:
    """Broadcast messages of several sizes; return the communicators used and the number of wrong elements."""
    used_comms, wrong, call = [], 0, native._call

    def recorded(method: str, args: tuple[object, ...], on: MPI.Intracomm) -> object:
        used_comms.append("tuned" if on is better else "default")
        return call(method, args, on)

    native._call = recorded
    for nbytes in (1 << 15, 1 << 16, 1 << 18, 1 << 19):
        values = np.arange(nbytes, dtype=np.uint8) if WORLD.rank == 0 else np.zeros(nbytes, np.uint8)
        comm.Bcast(values)
        wrong += int(np.count_nonzero(values != np.arange(nbytes, dtype=np.uint8)))
    native._call = call
    return {"used": used_comms, "wrong": WORLD.allreduce(wrong)}


if __name__ == "__main__":
    main()
