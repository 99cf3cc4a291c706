"""Run under mpirun: use a schedule library, the argument, and compare every result with native MPI."""

from __future__ import annotations

import sys

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp._dispatch.runtime import Runtime

used: list[str] = []
submit = Runtime._submit


def recorded(self, plan, call, **more):  # type: ignore[no-untyped-def]
    used.append(f"{call.collective} {call.root} {plan.algorithm.name}")
    return submit(self, plan, call, **more)


Runtime._submit = recorded

world = MPI.COMM_WORLD
rank, size, count = world.rank, world.size, 100_000
own = np.random.default_rng(rank).integers(-9, 9, count).astype(np.float32)
with Communicator(world, "split", plans=sys.argv[1]) as comm:
    total, wanted = np.empty_like(own), np.empty_like(own)
    comm.Allreduce(own, total)
    world.Allreduce(own, wanted)
    assert (total == wanted).all()

    total = own.copy()
    comm.Allreduce(MPI.IN_PLACE, total)
    assert (total == wanted).all(), "no schedule fits in place: a built-in algorithm"

    gathered, wanted = np.empty(count * size, np.float32), np.empty(count * size, np.float32)
    comm.Allgather(own, gathered)
    world.Allgather(own, wanted)
    assert (gathered == wanted).all()

    for root in (0, 1):
        sent, wanted = own.copy(), own.copy()
        comm.Bcast(sent, root)
        world.Bcast(wanted, root)
        assert (sent == wanted).all()

    short = np.ones(3, np.float32)
    comm.Allreduce(MPI.IN_PLACE, short)
    assert (short == size).all()
    comm.Allreduce(own, total, algorithm="tree")

if rank == 0:
    print("\n".join(used))
