"""Run under mpirun: codec `auto` explores its candidates, also around a call in which the ranks disagree."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator, GpucompError
from mpi_gpucomp._tuning.tuner import CALLS_PER_SAMPLE, NATIVE
from mpi_gpucomp.schedule.cost import LinkCost

WORLD = MPI.COMM_WORLD
WEIGHTS = np.random.default_rng(0).normal(0, 0.02, 1 << 19).astype(np.float32)


def arrives(comm: Communicator, root: int) -> bool:
    """Broadcast; return True if all elements arrived."""
    values = WEIGHTS.copy() if WORLD.rank == root else np.zeros_like(WEIGHTS)
    comm.Bcast(values, root)
    return values.tobytes() == WEIGHTS.tobytes()


def error_of_mismatch(comm: Communicator) -> str:
    """Broadcast another count on one rank; return the error."""
    try:
        comm.Bcast(WEIGHTS[: WEIGHTS.size - (WORLD.rank == 1)].copy())
    except GpucompError as error:
        return type(error).__name__
    return "no error"


def as_if_slow(comm: Communicator) -> None:
    """Pretend a network so slow that the content of a message decides, which the measurements then contradict."""
    known = comm._dispatcher.tuner._calibrations
    comm._dispatcher.tuner._candidates = lambda *_: [NATIVE]  # type: ignore[method-assign]
    measured = known["broadcast"].measured
    native = tuple((nbytes, 8e-8 * nbytes) for nbytes, _ in measured.native)
    # Without what the busy machine added to the measured runs of the engine.
    measured = replace(measured, link=LinkCost(1e-4, 8e-8), native=native, per_hop=0.0, scale=1.0)
    known["broadcast"] = replace(known["broadcast"], measured=measured)


def many(comm: Communicator) -> bool:
    """Broadcast two lengths of one size class, described differently on one rank; return True if all arrived."""
    right, quick = [], 0
    for call in range(100):
        length = WEIGHTS.size - 8 * (call % 3 == 0)
        values = WEIGHTS[:length].copy() if WORLD.rank == 0 else np.zeros(length, np.float32)
        comm.Bcast([values, MPI.FLOAT] if WORLD.rank == 1 else values)
        right.append(values.tobytes() == WEIGHTS[:length].tobytes())
        quick += any(0 < lifetime.ttl < CALLS_PER_SAMPLE for _, lifetime in comm._fast_path.values())
    return all(right) and (quick > 0 or WORLD.rank == 1)


def sums(comm: Communicator) -> bool:
    """Sum before and after autotuning, which may change the plan; return True if each sum was correct."""
    values = np.full(1 << 19, WORLD.rank + 1, np.float32)
    right = []
    for tune in (False, True, False):
        total = np.zeros_like(values)
        if tune:
            comm.autotune("Allreduce", values, total)
        comm.Allreduce(values, total)
        right.append(bool((total == WORLD.size * (WORLD.size + 1) / 2).all()))
    return all(right)


def main() -> None:
    """Print the results of each rank."""
    with Communicator(WORLD) as comm:
        comm.calibrate("Bcast")
        right = [arrives(comm, root=0)]
        error = error_of_mismatch(comm)
        right += [arrives(comm, root) for root in range(WORLD.size)]
        comm.autotune("Bcast", WEIGHTS.copy())
        right += [arrives(comm, root=1)]
        right += [sums(comm)]
        as_if_slow(comm)
        comm._fast_path.clear()
        right += [many(comm)]
        races = comm._dispatcher.tuner._races.values()
        settled = [race.decided for race in races]
        found = {"error": error, "right": all(right), "settled": settled, "left": [race._running for race in races]}
    for rank, line in enumerate(WORLD.gather(json.dumps(found)) or ()):
        print(f"{rank} {line}", flush=True)


if __name__ == "__main__":
    main()
