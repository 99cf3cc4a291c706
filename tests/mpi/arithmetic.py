"""Check the summation order of the ring, reductions of 16-bit floats, and the error bounds of lossy codecs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from buffers import torch
from calls import OPERATIONS, RANK, RANKS, SIZE, WORLD
from comparison import Ledger

from mpi_gpucomp import Communicator

COUNT, CHUNK, RINGS = 5000, 2000, 2
BOUND = 1e-3


def reduce_in_ring_order(ranks: Any, chunk: int, op: Callable[[Any, Any], Any]) -> Any:
    """Reduce each chunk in rank order, starting after its owner: chunk c belongs to rank c modulo n."""
    total = ranks[0].copy() if isinstance(ranks[0], np.ndarray) else ranks[0].clone()
    for number, start in enumerate(range(0, len(total), chunk)):
        at, first = slice(start, start + chunk), number + 1
        partial = ranks[first % SIZE][at]
        for distance in range(1, SIZE):
            partial = op(partial, ranks[(first + distance) % SIZE][at])
        total[at] = partial
    return total


def order_of_sums(ledger: Ledger, comm: Communicator) -> None:
    """Sum numbers whose rounding depends on the order, and compare with the documented order bit for bit."""
    for dtype, codec in (("float32", "none"), ("float32", "split"), ("float64", "mpc")):
        values = np.random.default_rng(RANK).normal(size=COUNT).astype(dtype)
        by_rank, got = WORLD.allgather(values), np.empty_like(values)
        comm.Allreduce(values, got, algorithm="ring", codec=codec, chunk=CHUNK)
        chunk = min(CHUNK // values.itemsize, -(-COUNT // (RINGS * SIZE)))
        wanted = reduce_in_ring_order(by_rank, chunk, np.add)
        ledger.check(got.tobytes() == wanted.tobytes(), f"order of a ring's sums, {dtype}, {codec}", got[:5])
        if SIZE > 2:  # the values must distinguish orders
            other = reduce_in_ring_order(by_rank[::-1], chunk, np.add)
            ledger.check(got.tobytes() != other.tobytes(), "the sum depends on the order", got[:5])


# 16-bit floats


def sixteen_bits(ledger: Ledger, comm: Communicator) -> None:
    """Reduce and move tensors of types that MPI lacks, and compare with torch."""
    if torch is None:
        return
    ops = {"sum": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum}
    for dtype in (torch.bfloat16, torch.float16):
        values = torch.from_numpy(np.random.default_rng(RANK).normal(size=COUNT)).to(dtype)
        by_rank = [one.view(dtype) for one in WORLD.allgather(values.view(torch.int16))]
        for codec in ("none", "split"):
            for name, op in ops.items():
                got = torch.empty_like(values)
                comm.Allreduce(values, got, OPERATIONS[name], codec=codec, chunk=CHUNK, algorithm="ring")
                wanted = reduce_in_ring_order(by_rank, min(CHUNK // 2, -(-COUNT // (RINGS * SIZE))), op)
                ledger.check(same_bits(got, wanted), f"{name} of {dtype}, {codec}", got[:5])
            moved(ledger, comm, by_rank, codec)
        small_ones(ledger, comm, dtype)


def same_bits(one: Any, other: Any) -> bool:
    return bool(torch.equal(one.view(torch.int16), other.view(torch.int16)))


def moved(ledger: Ledger, comm: Communicator, by_rank: list[Any], codec: str) -> None:
    mine = by_rank[RANK]
    gathered = torch.zeros(SIZE * COUNT, dtype=mine.dtype)
    comm.Allgather(mine, gathered, codec=codec)
    ledger.check(same_bits(gathered, torch.cat(by_rank)), f"Allgather of {mine.dtype}, {codec}", gathered[:5])
    spread = torch.zeros(2 * COUNT, dtype=mine.dtype)
    spread[::2] = mine
    comm.Bcast(spread[::2], SIZE - 1, codec=codec)
    right = same_bits(spread[::2].contiguous(), by_rank[-1]) and not spread[1::2].any()
    ledger.check(right, f"Bcast of {mine.dtype}, {codec}", spread[:5])


def small_ones(ledger: Ledger, comm: Communicator, dtype: Any) -> None:
    """Move a few elements through MPI, and reduce them in the engine."""
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
"""The largest error of each collective with its default algorithm, in multiples of the bound."""


def within_the_bound(ledger: Ledger, comm: Communicator) -> None:
    """Check the documented error bounds, and that an Allreduce gives all ranks the same values."""
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
