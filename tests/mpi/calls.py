"""Every collective of mpi4py: the arguments of each rank, and native MPI's result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import buffers
import numpy as np
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
RANKS = range(SIZE)

ROOTED = ("Bcast", "Reduce", "Gather", "Gatherv", "Scatter", "Scatterv")
REDUCING = ("Reduce", "Allreduce", "Reduce_scatter", "Reduce_scatter_block", "Scan", "Exscan")
METHODS = (*ROOTED, *REDUCING[1:], "Allgather", "Allgatherv", "Alltoall", "Alltoallv")
OPERATIONS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
SIXTEEN_BITS = ("float16", "bfloat16")

Blocks = list[np.ndarray] | None


def uneven(count: int, one: int, other: int) -> int:
    """Return the number of elements that two ranks exchange: symmetric, and zero for some pairs."""
    return 0 if (one + other) % 4 == 3 else max(0, count - one * other)


def whole_numbers(count: int, dtype: str, seed: int, op: str) -> np.ndarray:
    """Return numbers whose sums and short products are exact in every type and order."""
    numbers = (np.arange(count) * 7 + seed * 3) % (3 if op == "prod" else 11) + 1
    if np.dtype(dtype).kind == "c":
        return (numbers + 1j * (numbers % 3)).astype(dtype)
    return numbers.astype(dtype)


@dataclass(frozen=True)
class Case:
    """One collective on data of one kind."""

    method: str
    count: int
    dtype: str
    root: int = 0
    op: str = "sum"
    in_place: bool = False

    @property
    def at_root(self) -> bool:
        return self.root == RANK

    @property
    def vector(self) -> bool:
        return self.method.endswith("v")

    def __str__(self) -> str:
        root = f", root {self.root}" if self.method in ROOTED else ""
        op = f", {self.op}" if self.method in REDUCING else ""
        return f"{self.method} of {self.count} {self.dtype}{root}{op}{', in place' * self.in_place}"

    def _block(self, count: int, other: int = 0) -> np.ndarray:
        return whole_numbers(count, self.dtype, RANK + 10 * other, self.op)

    def _room(self, counts: list[int]) -> list[np.ndarray]:
        return [np.full(count, 77, self.dtype) for count in counts]

    def shares(self) -> list[int]:
        """Return the number of elements of each rank's block."""
        return [uneven(self.count, rank, 1) if self.vector else self.count for rank in RANKS]

    def parts(self) -> tuple[Blocks, Blocks]:
        """Return the blocks to send and room for those to receive; None where this rank passes no buffer."""
        match self.method:
            case "Bcast":
                return None, [self._block(self.count)]
            case "Reduce" | "Allreduce" | "Scan" | "Exscan":
                sent, received = [self._block(self.count)], self._room([self.count])
            case "Allgather" | "Allgatherv" | "Gather" | "Gatherv":
                shares = self.shares()
                sent, received = [self._block(shares[RANK])], self._room(shares)
            case "Scatter" | "Scatterv":
                shares = self.shares()
                sent = [self._block(count, to) for to, count in enumerate(shares)] if self.at_root else None
                return sent, self._room([shares[RANK]])
            case "Reduce_scatter":
                shares = [uneven(self.count, rank, 1) for rank in RANKS]
                sent, received = [self._block(sum(shares))], self._room([shares[RANK]])
            case "Reduce_scatter_block":
                sent, received = [self._block(self.count, to) for to in RANKS], self._room([self.count])
            case _:
                counts = [uneven(self.count, RANK, to) if self.vector else self.count for to in RANKS]
                sent, received = [self._block(count, to) for to, count in enumerate(counts)], self._room(counts)
        return sent, received if self.method not in ROOTED or self.at_root else None

    def placed_parts(self) -> tuple[Any, Any]:
        """Return the same with MPI.IN_PLACE where this rank passes it, and the input in the output buffer."""
        sent, received = self.parts()
        if not self.in_place or (self.method in ROOTED and not self.at_root):
            return sent, received
        if self.method.startswith("Scatter"):
            return sent, MPI.IN_PLACE
        if "gather" in self.method.lower():
            assert sent and received
            received[RANK] = sent[0]
            return MPI.IN_PLACE, received
        return MPI.IN_PLACE, sent

    @property
    def rest(self) -> tuple[Any, ...]:
        """Return the arguments after the buffers."""
        counts = ([uneven(self.count, rank, 1) for rank in RANKS],) if self.method == "Reduce_scatter" else ()
        op = (OPERATIONS[self.op],) if self.method in REDUCING else ()
        return counts + op + ((self.root,) if self.method in ROOTED else ())

    def significant(self, received: np.ndarray) -> np.ndarray:
        """Return the part of a receive buffer that the collective defines."""
        if not self.in_place or not self.method.startswith("Reduce_scatter"):
            return received
        return received[: uneven(self.count, RANK, 1) if self.method == "Reduce_scatter" else self.count]

    def arguments(self, sent: Any, received: Any) -> tuple[Any, ...]:
        """Return all arguments of the method."""
        return (received, *self.rest) if self.method == "Bcast" else (sent, received, *self.rest)


def kinds(case: Case, place: int) -> list[buffers.Kind]:
    """Return the kinds of buffers that an argument can be: 0 for the send buffer, 1 for the receive buffer."""
    if case.vector and not one_block(case, place):
        return buffers.VECTORS
    sends_only = place == 0 or (case.method == "Bcast" and case.at_root)
    return buffers.SENDING if sends_only else buffers.RECEIVING


def one_block(case: Case, place: int) -> bool:
    """Return True if an argument of a v-variant is a single block, without counts."""
    return case.method != "Alltoallv" and place == (1 if case.method == "Scatterv" else 0)


def hold(part: Any, kind: buffers.Kind) -> Any:
    """Put blocks into a buffer of this kind; return other arguments unchanged."""
    return kind(part) if isinstance(part, list) else buffers.Held(part, lambda: np.zeros(0))


@cache
def answer(case: Case) -> bytes:
    """Return native MPI's result in this rank's receive buffer, on contiguous arrays; 16-bit types in 32 bits."""
    wide = replace(case, dtype="float32") if case.dtype in SIXTEEN_BITS else case
    parts = wide.placed_parts()
    sent, received = (hold(part, kinds(wide, place)[0]) for place, part in enumerate(parts))
    getattr(WORLD, case.method)(*wide.arguments(sent.spec, received.spec))
    return case.significant(received.read()).astype(case.dtype).tobytes()
