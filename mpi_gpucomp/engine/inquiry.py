"""Is everybody waiting for everybody? Asks all ranks what they wait for, and judges.

Preemption solves every order in which collectives are started. It cannot help ranks that wait for one collective before
they start another which a peer waits for. That shows when all who should join are waiting themselves.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpi_gpucomp.engine.roll import Call

__all__ = ["Inquiry", "Status", "describe", "is_circular"]

ANSWER_SECONDS = 2.0
"""How long a rank has to answer before it counts as one that does not."""


class Status(NamedTuple):
    """What a rank tells of itself: what it waits for (with a title to print), and how far it is with every name."""

    waits: dict[Call, str]
    runs: dict[str, int]

    def joined(self, call: Call) -> bool:
        """Say whether it has started this call."""
        return self.runs.get(call.name, 0) >= call.run


class Inquiry:
    """One round of questions."""

    def __init__(self, number: int, size: int, rank: int, own: Status) -> None:
        """Ask all but this rank."""
        self.number = number
        self._size, self._until = size, time.monotonic() + ANSWER_SECONDS
        self.told: dict[int, Status] = {rank: own}

    @property
    def complete(self) -> bool:
        """Say whether all have answered, or had their time."""
        return len(self.told) == self._size or time.monotonic() > self._until


def _absent(told: Mapping[int, Status], size: int, call: Call) -> list[int]:
    return [rank for rank in range(size) if rank not in told or not told[rank].joined(call)]


def is_circular(told: Mapping[int, Status], size: int, rank: int) -> bool:
    """Say whether everyone whom `rank` waits for, directly or not, waits as well: then nothing will ever move."""
    circle, fresh = {rank}, [rank]
    while fresh:
        status = told.get(fresh.pop())
        if status is None or not status.waits:
            return False
        for call in status.waits:
            absent = _absent(told, size, call)
            if not absent:
                return False
            fresh += [other for other in absent if other not in circle]
            circle.update(absent)
    return True


def describe(told: Mapping[int, Status], size: int) -> str:
    """Say who waits for what, and who has not joined it."""
    parts = []
    for rank in range(size):
        status = told.get(rank)
        if status is None:
            parts.append(f"rank {rank} does not answer")
        elif not status.waits:
            parts.append(f"rank {rank} waits for nothing here")
        else:
            parts += [f"rank {rank} waits for {title}{_who(told, size, call)}" for call, title in status.waits.items()]
    return "; ".join(parts)


def _who(told: Mapping[int, Status], size: int, call: Call) -> str:
    absent = _absent(told, size, call)
    if not absent:
        return ", which all have joined"
    many = len(absent) > 1
    return f", which rank{'s' * many} {', '.join(map(str, absent))} {'have' if many else 'has'} not joined"
