"""Run under mpirun: gloo and compression per message against native MPI's results; prints the results of all ranks.

baseline_ranks.py gloo | messages
"""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

from osu_bench.suite.baselines import Gloo, PerMessage, PerMessageChain

WORLD = MPI.COMM_WORLD
SIZE, RANK = WORLD.size, WORLD.rank
COUNTS = (1, 1000, 300_000)
Array = np.ndarray[Any, Any]


def values(count: int, dtype: Any, rank: int) -> Array:
    """Return small whole numbers: their sums are exact in every type."""
    return np.random.default_rng([count, rank]).integers(-20, 20, count).astype(dtype)


def everybodys(count: int, dtype: Any) -> Array:
    return np.stack([values(count, dtype, rank) for rank in range(SIZE)])


class Ledger:
    """What was compared, and what was not equal."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.compared = 0

    def same(self, what: str, got: Array, expected: Array) -> None:
        self.compared += 1
        if got.shape != expected.shape or got.tobytes() != expected.astype(got.dtype).tobytes():
            self.wrong.append(f"rank {RANK}: {what}, {got.size} x {got.dtype}")


def broadcasts(ledger: Ledger, what: str, baseline: Gloo | PerMessage, count: int, dtype: Any) -> None:
    for root in range(SIZE):
        array = values(count, dtype, RANK)
        baseline.bcast(array, root)
        ledger.same(f"{what} bcast from {root}", array, values(count, dtype, root))


def sums_and_rings(ledger: Ledger, what: str, baseline: Gloo | PerMessage, count: int, dtype: Any) -> None:
    own, together = values(count, dtype, RANK), everybodys(count, dtype)
    recv, all_of_it = np.zeros_like(own), np.zeros(count * SIZE, own.dtype)
    baseline.allreduce(own, recv)
    ledger.same(f"{what} allreduce", recv, together.sum(0))
    ledger.same(f"{what} allreduce's send buffer", own, together[RANK])
    baseline.allgather(own, all_of_it)
    ledger.same(f"{what} allgather", all_of_it, together.reshape(-1))
    baseline.allreduce(own, own)
    ledger.same(f"{what} allreduce in place", own, together.sum(0))


def rest_of_gloo(ledger: Ledger, gloo: Gloo, count: int, dtype: Any) -> None:
    whole, together = values(count * SIZE, dtype, RANK), everybodys(count * SIZE, dtype)
    part, mine, root = whole[:count].copy(), slice(RANK * count, (RANK + 1) * count), SIZE - 1
    parts, out, piece = together[:, :count].reshape(-1), np.zeros_like(whole), np.zeros_like(part)
    gloo.reduce(whole, out, root)
    if root == RANK:
        ledger.same("gloo reduce", out, together.sum(0))
    gloo.reduce_scatter(whole, piece)
    ledger.same("gloo reduce_scatter", piece, together.sum(0)[mine])
    gloo.alltoall(whole, out)
    ledger.same("gloo alltoall", out, together[:, mine].reshape(-1))
    gloo.gather(part, out if root == RANK else None, root)
    if root == RANK:
        ledger.same("gloo gather", out, parts)
    gloo.scatter(whole if root == RANK else None, piece, root)
    ledger.same("gloo scatter", piece, together[root, mine])


def gloo(ledger: Ledger) -> None:
    before = threading.active_count()
    for counts in (COUNTS, COUNTS[:1]):  # a second time, once the first groups are closed
        with Gloo(WORLD) as group, Gloo(WORLD) as other:
            for count in counts:
                for dtype in (np.float32, np.float64, np.int64, ml_dtypes.bfloat16):
                    broadcasts(ledger, "gloo", group, count, dtype)
                    sums_and_rings(ledger, "gloo", other, count, dtype)
                    rest_of_gloo(ledger, group, count, dtype)
            as_bits = values(1000, ml_dtypes.bfloat16, RANK).view(np.uint16)
            group.allreduce(as_bits, as_bits)
            total = everybodys(1000, np.float32).sum(0).astype(ml_dtypes.bfloat16)
            ledger.same("gloo allreduce of bits", as_bits, total.view(np.uint16))
    if threading.active_count() != before:
        ledger.wrong.append(f"rank {RANK}: threads are left")


def messages(ledger: Ledger) -> None:
    for codec in ("none", "split"):
        with PerMessage(WORLD, codec, chunk=70_000) as tree:
            for count in COUNTS:
                for dtype in (np.float32, np.float64, ml_dtypes.bfloat16):
                    broadcasts(ledger, f"p2p {codec}", tree, count, dtype)
                    sums_and_rings(ledger, f"p2p {codec}", tree, count, dtype)
            if (min(tree.stats()) > 0) != (codec != "none" and SIZE > 1):
                ledger.wrong.append(f"rank {RANK}: {codec} has sent and received {tree.stats()} bytes")
        along = PerMessageChain(WORLD, codec, chunk=70_000, message=110_000)
        for count in COUNTS:
            broadcasts(ledger, f"p2p-chain {codec}", along, count, np.float32)
        along.close()
    bounded(ledger)


def bounded(ledger: Ledger) -> None:
    """Compare with what the hops may do to values: each adds an error of at most the codec's bound."""
    exact = np.random.default_rng(0).normal(0, 1, 100_000).astype(np.float32)
    for kind, hops in ((PerMessage, (RANK).bit_count()), (PerMessageChain, RANK)):
        array = exact.copy() if RANK == 0 else np.zeros_like(exact)
        with kind(WORLD, "bound:abs=1e-2") as baseline:
            baseline.bcast(array)
        error = float(np.abs(array - exact).max())
        ledger.compared += 1
        if error > hops * 1e-2 * 1.001 or (error == 0) != (RANK == 0):
            ledger.wrong.append(f"rank {RANK}: {kind.__name__} has an error of {error}")


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    ledger = Ledger()
    {"gloo": gloo, "messages": messages}[sys.argv[1]](ledger)
    wrong = [*chain.from_iterable(WORLD.allgather(ledger.wrong))]
    if RANK == 0:
        print(json.dumps({"mpi": MPI.Get_library_version(), "compared": ledger.compared, "wrong": wrong}))


if __name__ == "__main__":
    main()
