"""Run under mpirun: calibrate for collectives, then send what `auto` chooses; print what each rank has found."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp._tuning.measure import METHODS, Calibration, arguments, calibrate
from mpi_gpucomp._tuning.model import DEFAULT_CHUNK
from mpi_gpucomp.codec.auto import Auto, Costs
from mpi_gpucomp.device import dtype_of_name
from mpi_gpucomp.schedule.algorithms import algorithms

WORLD = MPI.COMM_WORLD
MIB = 1 << 20


def run(comm: Communicator, collective: str, nbytes: int) -> None:
    """Run a collective through the engine as calibration wants it."""
    sent, received = (np.ones(max(1, nbytes // 4 // WORLD.size) * WORLD.size, np.float32) for _ in range(2))
    options = {"codec": "none", "algorithm": algorithms(collective)[0].name, "chunk": DEFAULT_CHUNK}
    match collective:
        case "broadcast":
            comm.Bcast(sent, **options)
        case "allgather":
            comm.Allgather(sent[: sent.size // WORLD.size], received, **options)
        case _:
            comm.Allreduce(sent, received, **options)


def facts(found: Calibration) -> dict[str, object]:
    """Return everything that decisions are made by, and some decisions."""
    figures, dtype = found.figures, dtype_of_name("float32")
    assert dtype is not None
    choices = [found.choose(size * MIB, dtype, "split", ratio)[:3] for size in (1, 7, 64) for ratio in (1.0, 1.2, 4.0)]
    coding = {f"{codec} {name}": speeds for (codec, name), speeds in found.costs.coding.items()}
    costs = {"wire": found.costs.wire, "sample": found.costs.sample, "coding": coding}
    return {"collective": found.collective, "figures": [*figures.__dict__.values()], "costs": costs, "choices": choices}


def broadcast(comm: Communicator, costs: Costs) -> bool:
    """Say whether weights and other bits arrive as they were sent, where ranks have different costs."""
    wanted = np.random.default_rng(0).normal(0, 0.02, 600_000).astype(np.float32)
    wanted[300_000:] = np.frombuffer(np.random.default_rng(1).bytes(1_200_000), np.float32)
    auto = Auto(costs if WORLD.rank else Costs(wire=8e-9, sample=0))
    values = wanted.copy() if WORLD.rank == 0 else np.zeros_like(wanted)
    comm.Bcast(values, codec=auto, algorithm="chain", chunk=500_000)
    return values.tobytes() == wanted.tobytes()


def tell(found: dict[str, object]) -> None:
    """Print what all ranks have found, a line for each, by one of them so that lines stay whole."""
    for rank, line in enumerate(WORLD.gather(json.dumps(found)) or ()):
        print(f"{rank} {line}", flush=True)


def main() -> None:
    """Calibrate for collectives that differ in kind, of which all but the first take over what is known."""
    known: Calibration | None = None
    with Communicator(WORLD) as comm:
        for collective in ("broadcast", "allreduce", "allgather"):
            known = calibrate(WORLD, collective, partial(run, comm, collective), known=known)
            tell(facts(known))
        assert known is not None
        tell({"arrived": broadcast(comm, known.costs)})
    for collective, (method, _) in METHODS.items():
        buffers = arguments(collective, WORLD.size, 16 * WORLD.size)
        getattr(WORLD, method)(*buffers)
        assert collective != "allreduce" or (buffers[1] == WORLD.size).all()


if __name__ == "__main__":
    main()
