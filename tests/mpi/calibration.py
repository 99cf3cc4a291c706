"""Run under mpirun: calibrate for several collectives, broadcast with codec `auto`, and print each rank's results."""

from __future__ import annotations

import json

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp._tuning.measure import Calibration, calibrate, sample_buffers
from mpi_gpucomp.codec.auto import Auto, Costs
from mpi_gpucomp.device import dtype_of_name
from mpi_gpucomp.schedule.ir import COLLECTIVES

WORLD = MPI.COMM_WORLD
MIB = 1 << 20


def facts(found: Calibration) -> dict[str, object]:
    """Return all measured figures, and some plans made from them."""
    measured, dtype = found.measured, dtype_of_name("float32")
    assert dtype is not None
    choices = [found.best(size * MIB, dtype, "split", ratio)[:3] for size in (1, 7, 64) for ratio in (1.0, 1.2, 4.0)]
    coding = {f"{codec} {name}": speeds for (codec, name), speeds in found.costs.coding.items()}
    costs = {"wire": found.costs.wire, "sample": found.costs.sample, "coding": coding}
    figures = [*measured.__dict__.values()]
    return {"collective": found.collective, "figures": figures, "costs": costs, "choices": choices}


def broadcast(comm: Communicator, costs: Costs) -> bool:
    """Return True if weights and random bits arrive unchanged when ranks have different costs."""
    wanted = np.random.default_rng(0).normal(0, 0.02, 600_000).astype(np.float32)
    wanted[300_000:] = np.frombuffer(np.random.default_rng(1).bytes(1_200_000), np.float32)
    auto = Auto(costs if WORLD.rank else Costs(wire=8e-9, sample=0))
    values = wanted.copy() if WORLD.rank == 0 else np.zeros_like(wanted)
    comm.Bcast(values, codec=auto, algorithm="chain", chunk=500_000)
    return values.tobytes() == wanted.tobytes()


def print_by_rank(found: dict[str, object]) -> None:
    """Print a line for each rank, all of them on rank 0 so that lines are not mixed."""
    for rank, line in enumerate(WORLD.gather(json.dumps(found)) or ()):
        print(f"{rank} {line}", flush=True)


def main() -> None:
    """Calibrate for several collectives; all but the first reuse the link measurements."""
    known: Calibration | None = None
    with Communicator(WORLD) as comm:
        for collective in ("broadcast", "allreduce", "allgather"):
            known = calibrate(comm._runtime, collective, known=known)
            print_by_rank(facts(known))
        assert known is not None
        print_by_rank({"arrived": broadcast(comm, known.costs)})
    for collective, known_as in COLLECTIVES.items():
        buffers = sample_buffers(collective, WORLD.size, 16 * WORLD.size)
        getattr(WORLD, known_as.method)(*buffers)
        assert collective != "allreduce" or (buffers[1] == WORLD.size).all()


if __name__ == "__main__":
    main()
