"""Run under mpirun: every collective of a Communicator against MPI's own result, bit for bit; any order; bounds."""

from __future__ import annotations

import random

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


def same(collective: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.tobytes() == theirs.tobytes(), f"rank {RANK}: {collective}: {ours[:5]} instead of {theirs[:5]}"


def against_mpi(comm: Communicator, count: int, dtype: str) -> None:
    """Compare all collectives on whole numbers, whose sums are exact in any order."""
    one, all_of_it = (np.arange(count) % 13 + RANK).astype(dtype), (np.arange(SIZE * count) + RANK).astype(dtype)
    root = SIZE - 1
    for name, sent, length in (
        ("Allreduce", one, count),
        ("Allgather", one, SIZE * count),
        ("Alltoall", all_of_it, SIZE * count),
        ("Reduce_scatter_block", all_of_it, count),
    ):
        ours, theirs = np.zeros(length, dtype), np.zeros(length, dtype)
        getattr(comm, name)(sent, ours)
        getattr(WORLD, name)(sent, theirs)
        same(name, ours, theirs)
    for name, sent, length in (("Reduce", one, count), ("Gather", one, SIZE * count)):
        ours, theirs = np.zeros(length, dtype), np.zeros(length, dtype)
        getattr(comm, name)(sent, ours if root == RANK else None, root=root)
        getattr(WORLD, name)(sent, theirs if root == RANK else None, root=root)
        same(name, ours, theirs)
    ours, theirs = np.zeros(count, dtype), np.zeros(count, dtype)
    comm.Scatter(all_of_it if root == RANK else None, ours, root=root)
    WORLD.Scatter(all_of_it if root == RANK else None, theirs, root=root)
    same("Scatter", ours, theirs)
    ours, theirs = one.copy(), one.copy()
    comm.Bcast(ours, root)
    WORLD.Bcast(theirs, root)
    same("Bcast", ours, theirs)


def in_place(comm: Communicator) -> None:
    ours = np.arange(5000, dtype=np.float32) * (RANK + 1)
    theirs = ours.copy()
    comm.Allreduce(MPI.IN_PLACE, ours, MPI.MAX)
    WORLD.Allreduce(MPI.IN_PLACE, theirs, MPI.MAX)
    same("Allreduce in place", ours, theirs)
    ours = np.arange(SIZE * 3000, dtype=np.float64) + RANK
    theirs = ours.copy()
    comm.Allgather(MPI.IN_PLACE, ours)
    WORLD.Allgather(MPI.IN_PLACE, theirs)
    same("Allgather in place", ours, theirs)

    root = SIZE - 1
    for name, length, share in (("Reduce", 4000, 4000), ("Gather", SIZE * 700, 700)):
        ours = (np.arange(length) + RANK).astype(np.float32)
        theirs = ours.copy()
        for comm_here, buffer in ((comm, ours), (WORLD, theirs)):
            mine = buffer if share == length else buffer[RANK * share : (RANK + 1) * share]
            sent = MPI.IN_PLACE if root == RANK else mine
            getattr(comm_here, name)(sent, buffer if root == RANK else None, root=root)
        same(f"{name} in place", ours, theirs)


def in_any_order(comm: Communicator) -> None:
    values = [np.full(3000 + number, float(number + RANK), np.float32) for number in range(60)]
    order = list(range(len(values)))
    random.Random(RANK).shuffle(order)
    requests = [comm.Iallreduce(MPI.IN_PLACE, values[number], name=f"grad.{number}") for number in order]
    for request in requests:
        request.Wait()
    for number, array in enumerate(values):
        assert (array == sum(number + rank for rank in range(SIZE))).all(), f"rank {RANK}: grad.{number}"


def lossy(comm: Communicator) -> None:
    bound = 1e-3
    values = np.random.default_rng(RANK).normal(size=50_000).astype(np.float32)
    ours, exact = np.empty_like(values), np.empty_like(values)
    comm.Allreduce(values, ours, codec=f"bound:abs={bound}")
    WORLD.Allreduce(values, exact)
    assert np.abs(ours - exact).max() <= 1.001 * SIZE * bound
    assert len({*WORLD.allgather(ours.tobytes())}) == 1, "ranks differ"
    copy = values.copy()
    comm.Bcast(copy, codec=f"bound:abs={bound}")
    root = WORLD.bcast(values)
    assert np.abs(copy - root).max() <= bound


def main() -> None:
    with Communicator(WORLD, codec="split", chunk=20_000, small=0) as comm:
        for dtype in ("float32", "float64"):
            for count in (0, 1, 3, 1000, 30_000):
                against_mpi(comm, count, dtype)
        in_place(comm)
        in_any_order(comm)
        lossy(comm)
    print(f"rank {RANK} of {SIZE}: all as MPI has it")


if __name__ == "__main__":
    main()
