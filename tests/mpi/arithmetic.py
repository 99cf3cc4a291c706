"""In which order the default ring adds up, what 16 bits become, and how far lossy codecs may err."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from buffers import torch
from calls import OPERATIONS, RANK, RANKS, SIZE, WORLD
from comparing import Ledger

from mpi_gpucomp import Communicator

COUNT, CHUNK, RINGS = 5000, 2000, 2
BOUND = 1e-3


def in_order_of_the_ring(ranks: Any, piece: int, op: Callable[[Any, Any], Any]) -> Any:
    """Add up each piece in the order of the ranks, starting behind its owner: piece c is that of rank c modulo n."""
    total = ranks[0].copy() if isinstance(ranks[0], np.ndarray) else ranks[0].clone()
    for number, start in enumerate(range(0, len(total), piece)):
        at, first = slice(start, start + piece), number + 1
        partial = ranks[first % SIZE][at]
        for distance in range(1, SIZE):
            partial = op(partial, ranks[(first + distance) % SIZE][at])
        total[at] = partial
    return total


def order_of_sums(ledger: Ledger, comm: Communicator) -> None:
    """Sum numbers that every order rounds differently, bit for bit as the documented order does."""
    for dtype, codec in (("float32", "none"), ("float32", "split"), ("float64", "mpc")):
        values = np.random.default_rng(RANK).normal(size=COUNT).astype(dtype)
        everybody, got = WORLD.allgather(values), np.empty_like(values)
        comm.Allreduce(values, got, algorithm="ring", codec=codec, chunk=CHUNK)
        piece = min(CHUNK // values.itemsize, -(-COUNT // (RINGS * SIZE)))
        wanted = in_order_of_the_ring(everybody, piece, np.add)
        ledger.check(got.tobytes() == wanted.tobytes(), f"order of a ring's sums, {dtype}, {codec}", got[:5])
        if SIZE > 2:  # the test must tell orders apart
            other = in_order_of_the_ring(everybody[::-1], piece, np.add)
            ledger.check(got.tobytes() != other.tobytes(), "another order gives another sum", got[:5])


# 16 bits


def sixteen_bits(ledger: Ledger, comm: Communicator) -> None:
    """Reduce and move tensors whose type MPI does not know, as torch has it."""
    if torch is None:
        return
    ops = {"sum": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum}
    for dtype in (torch.bfloat16, torch.float16):
        values = torch.from_numpy(np.random.default_rng(RANK).normal(size=COUNT)).to(dtype)
        everybody = [one.view(dtype) for one in WORLD.allgather(values.view(torch.int16))]
        for codec in ("none", "split"):
            for name, op in ops.items():
                got = torch.empty_like(values)
                comm.Allreduce(values, got, OPERATIONS[name], codec=codec, chunk=CHUNK, algorithm="ring")
                wanted = in_order_of_the_ring(everybody, min(CHUNK // 2, -(-COUNT // (RINGS * SIZE))), op)
                ledger.check(same_bits(got, wanted), f"{name} of {dtype}, {codec}", got[:5])
            moved(ledger, comm, everybody, codec)
        small_ones(ledger, comm, dtype)


def same_bits(one: Any, other: Any) -> bool:
    return bool(torch.equal(one.view(torch.int16), other.view(torch.int16)))


def moved(ledger: Ledger, comm: Communicator, everybody: list[Any], codec: str) -> None:
    mine = everybody[RANK]
    gathered = torch.zeros(SIZE * COUNT, dtype=mine.dtype)
    comm.Allgather(mine, gathered, codec=codec)
    ledger.check(same_bits(gathered, torch.cat(everybody)), f"Allgather of {mine.dtype}, {codec}", gathered[:5])
    spread = torch.zeros(2 * COUNT, dtype=mine.dtype)
    spread[::2] = mine
    comm.Bcast(spread[::2], SIZE - 1, codec=codec)
    right = same_bits(spread[::2].contiguous(), everybody[-1]) and not spread[1::2].any()
    ledger.check(right, f"Bcast of {mine.dtype}, {codec}", spread[:5])


def small_ones(ledger: Ledger, comm: Communicator, dtype: Any) -> None:
    """Move a few elements, by way of MPI, and reduce them, which MPI cannot."""
    value, total = torch.full((3,), RANK + 1, dtype=dtype), torch.zeros(3, dtype=dtype)
    comm.Allreduce(value, total)
    ledger.same(f"small sum of {dtype}", total.tolist(), [SIZE * (SIZE + 1) / 2] * 3)
    comm.Bcast(value, SIZE - 1)
    ledger.same(f"small Bcast of {dtype}", value.tolist(), [SIZE] * 3)
    room = torch.zeros(3 * SIZE, dtype=dtype)
    comm.Iallgather(torch.full((3,), RANK, dtype=dtype), room).Wait()
    ledger.same(f"small Iallgather of {dtype}", room.tolist(), [rank for rank in RANKS for _ in range(3)])


# Lossy codecs

ERRORS = {
    "Bcast": 1,
    "Allgather": 1,
    "Gather": 1,
    "Scatter": 1,
    "Alltoall": 1,
    "Reduce": SIZE,
    "Allreduce": SIZE,
    "Reduce_scatter_block": SIZE,
}
"""How often the bound is the largest error of each collective with its default algorithm."""


def within_the_bound(ledger: Ledger, comm: Communicator) -> None:
    """Err at most as often as the documents say, and on all ranks alike where the result is one."""
    for method, times in ERRORS.items():
        blocks = SIZE if method in ("Alltoall", "Reduce_scatter_block", "Scatter") else 1
        room = {"Allgather": SIZE, "Gather": SIZE, "Alltoall": SIZE}.get(method, 1)
        values = np.random.default_rng(RANK).normal(size=blocks * COUNT).astype(np.float32)
        ours, exact = (np.zeros(room * COUNT, np.float32) for _ in range(2))
        if method == "Bcast":
            ours, exact = values.copy(), values.copy()
        arguments = (ours,) if method == "Bcast" else (values, ours)
        getattr(comm, method)(*arguments, codec=f"bound:abs={BOUND}", chunk=CHUNK)
        getattr(WORLD, method)(*((exact,) if method == "Bcast" else (values, exact)))
        worst = float(np.abs(ours - exact).max())
        ledger.check(worst <= 1.001 * times * BOUND, f"{method} within the bound", worst)
        if SIZE > 1 and method == "Allreduce":
            ledger.check(worst > 0, f"{method} is lossy", worst)
            ledger.same(f"{method} is the same on all ranks", len({*WORLD.allgather(ours.tobytes())}), 1)


def arithmetic(ledger: Ledger, comms: dict[str, Communicator]) -> None:
    order_of_sums(ledger, comms["split"])
    for comm in comms.values():
        sixteen_bits(ledger, comm)
    within_the_bound(ledger, comms["split"])
