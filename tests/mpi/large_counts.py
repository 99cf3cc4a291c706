"""Run under mpirun: plans and errors of more elements than native MPI counts; their memory is never touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator

WORLD = MPI.COMM_WORLD
COUNT = (1 << 31) + 10


def outcome(call: Callable[[], Any]) -> str:
    try:
        plan = call()
        return f"{plan.route.name} {plan.why}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    large, few = np.zeros(COUNT, np.int8), np.zeros(8, np.int8)
    half = COUNT // WORLD.size
    found: dict[str, str] = {}
    with Communicator(WORLD) as comm:
        found["Bcast"] = outcome(lambda: comm.explain("Bcast", large))
        found["Allreduce"] = outcome(lambda: comm.explain("Allreduce", MPI.IN_PLACE, large))
        found["Alltoall"] = outcome(lambda: comm.explain("Alltoall", MPI.IN_PLACE, large[: half * WORLD.size]))
        found["Scan"] = outcome(lambda: comm.explain("Scan", MPI.IN_PLACE, large))
    with Communicator(WORLD) as comm:
        sent = few if WORLD.rank else large[:-8]
        found["Gatherv"] = outcome(lambda: comm.explain("Gatherv", sent, [large, [COUNT - 8, 8]]))
    with Communicator(WORLD) as comm:
        found["chunk"] = outcome(lambda: comm.Send(few, WORLD.rank ^ 1, codec="split", chunk=3 << 30))
    found["setting"] = outcome(lambda: Communicator(WORLD, chunk=3 << 30))
    everyone = WORLD.gather(found)
    if WORLD.rank == 0:
        print(json.dumps(everyone))


if __name__ == "__main__":
    main()
