"""Run under mpirun: ranks placed round-robin on two simulated nodes; prints the algorithms and verifies results."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp._dispatch import runtime as nodes
from mpi_gpucomp._dispatch.runtime import Runtime

world = MPI.COMM_WORLD
rank, size, count = world.rank, world.size, 300_000
nodes.processor_name = lambda: f"node{rank % 2}"  # type: ignore[assignment]
used: list[str] = []
submit = Runtime._submit


def recorded(self, plan, call, **more):  # type: ignore[no-untyped-def]
    used.append(f"{call.collective} {plan.algorithm.name}")
    return submit(self, plan, call, **more)


Runtime._submit = recorded

found = nodes.nodes_of(world)
assert found == (tuple(range(0, size, 2)), tuple(range(1, size, 2)))
own = np.random.default_rng(rank).integers(-9, 9, count).astype(np.float32)
with Communicator(world, "split") as comm:
    for root in (0, 1):
        sent, wanted = own.copy(), own.copy()
        comm.Bcast(sent, root)
        world.Bcast(wanted, root)
        assert (sent == wanted).all()
    total, wanted = np.empty_like(own), np.empty_like(own)
    comm.Allreduce(own, total)
    world.Allreduce(own, wanted)
    assert (total == wanted).all()
    comm.Allreduce(own, total, algorithm="ring")
    half = comm.Split(rank % 2)
    assert half is not None
    with half:
        half.Bcast(sent)  # all ranks on one node
with Communicator(world) as comm:  # auto measures both kinds of links first
    comm.Allreduce(own, total)
    assert (total == wanted).all()
    placed = comm._dispatcher.tuner._calibrations["allreduce"].measured.layout
    assert placed is not None and placed.nodes == found
    assert len(set(world.allgather((placed.within, placed.between)))) == 1, "all ranks agree"

for wire, relayed_chunk in (("mpi", 1 << 18), ("tcp", 1 << 19)):  # sockets relay chunks, if they are not reduced
    with Communicator(world, "none", wire=wire) as comm:
        assert comm.explain("Bcast", np.zeros(1 << 20, np.float32)).chunk_bytes == relayed_chunk
        sent, total = np.zeros(1 << 20, np.float32), np.empty(1 << 20, np.float32)
        assert comm.explain("Allreduce", sent, total).chunk_bytes == 1 << 18

if rank == 0:
    print("\n".join(used[:5]))
