"""The balance of a v-variant: one number per rank, whose sum over all ranks is 0 if all counts match.

What a rank sends to another adds to it, and what the other expects is subtracted, each times a constant of the pair.
So all ranks learn from one sum of 8 bytes whether the counts of every pair agree, which no rank could tell alone: MPI
truncates such messages, without an error on most ranks.
"""

from __future__ import annotations

from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp._call.calls import Call

__all__ = ["MODULUS", "Balance"]

MODULUS = 1 << 64
SHOWN = 16
"""Counts that a description lists."""


def _constant(sender: int, receiver: int) -> int:
    """Return an odd number that looks random (the finalizer of splitmix64)."""
    mixed = (((sender << 32) | receiver) + 1) * 0x9E3779B97F4A7C15 % MODULUS
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % MODULUS
    return mixed ^ (mixed >> 31) | 1


class Balance:
    """Computes the balance of one rank's calls."""

    def __init__(self, rank: int, size: int) -> None:
        """Prepare the constants of this rank's pairs."""
        self._rank, self._size = rank, size
        self._to: list[int] = []
        self._from: list[int] = []

    def of(self, call: Call) -> int:
        """Return the balance of a v-variant, as a signed number."""
        if not self._to:
            self._to = [_constant(self._rank, peer) for peer in range(self._size)]
            self._from = [_constant(peer, self._rank) for peer in range(self._size)]
        sends, expects = self._counts(call)
        balance: int = sum(map(mul, sends, self._to)) - sum(map(mul, expects, self._from))
        return (balance + MODULUS // 2) % MODULUS - MODULUS // 2

    def describe(self, call: Call) -> str:
        """Describe the counts of this rank, for an error."""
        sends, expects = self._counts(call)
        if call.collective == "allgather":
            return f"sending {sends[0]}, receiving {_listed(expects)}"
        if call.collective == "alltoall":
            return f"sending {_listed(sends)}, receiving {_listed(expects)}"
        if call.root == self._rank:
            return f"receiving {_listed(expects)}" if call.collective == "gather" else f"sending {_listed(sends)}"
        return f"sending {sends[call.root]}" if call.collective == "gather" else f"receiving {expects[call.root]}"

    def _counts(self, call: Call) -> tuple[Sequence[int], Sequence[int]]:
        """Return the elements that this rank sends to each rank, and those that it expects from each."""
        sent, received = call.sent, call.received
        none, at_root = [0] * self._size, [int(peer == call.root) for peer in range(self._size)]
        if call.collective == "alltoall":
            return sent.counts if sent else none, received.counts if received else none
        if call.collective == "allgather":
            return [sent.counts[0]] * self._size if sent else none, received.counts if received else none
        if call.collective == "gather":
            sends = [sent.counts[0] * one for one in at_root] if sent else none
            return sends, received.counts if received else none
        expects = [received.counts[0] * one for one in at_root] if received else none
        return sent.counts if sent else none, expects


def _listed(counts: Sequence[int]) -> str:
    more = ", ..." if len(counts) > SHOWN else ""
    return f"[{', '.join(map(str, counts[:SHOWN]))}{more}]"
