"""The record path: what the engine calls for every chunk. It allocates nothing and takes no lock.

A chunk is recorded when it is complete, by one call into memory that was there before; until then its transfer knows
since when it is under way. Numbers of records come from a counter that threads may share. Nothing is judged here: that
is done for many records at once, from time to time (`tally.py`).
"""

from __future__ import annotations

import struct
import threading
from itertools import count
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.monitor.links import Tally
from mpi_gpucomp.monitor.trace_buffer import LAYOUT, TraceBuffer
from mpi_gpucomp.trace import CALL, RECV, SEND, CallTrace, Trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["CallRecorder", "CommRecorder", "Recorder"]

_pack = LAYOUT.pack_into
_pack_one = struct.Struct("<q").pack_into
_pack_peer = struct.Struct("<i").pack_into
_one = struct.Struct("<q").unpack_from
TRANSMIT, COMPLETE, NUMBER, PEER = 8, 16, 24, 52
"""Where those fields of a record are, see RECORD."""
MOST_SORTS, LOW = 1 << 16, 0xFFFFFFFF
GROUPS = 256


class Recorder:
    """Writes the records of a process into its box, and has them looked at from time to time."""

    def __init__(self, box: TraceBuffer) -> None:
        """Begin with the first record."""
        self.box, self.memory = box, box.memory
        self.mask, self.base = box.capacity - 1, box.base
        self.numbers = count(1)
        self.begun = self.ended = 0
        self._groups: list[CommRecorder | None] = [None] * GROUPS
        self._made = 0
        self._seen, self._lock = 0, threading.Lock()

    def communicator(self, world: Sequence[int], rank: int) -> CommRecorder:
        """Return the trace of a new communicator; `world` are its ranks in the world."""
        number = self._made % GROUPS
        group = self._groups[number] = CommRecorder(self, number, world, rank)
        self._made += 1
        return group

    @property
    def groups(self) -> list[CommRecorder]:
        """Return the communicators that are known, all but the oldest of very many."""
        return [group for group in self._groups if group is not None]

    def collect(self) -> None:
        """Let every communicator count its new records; if somebody is at it already, do nothing."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            last = next(self.numbers)
            first = max(self._seen + 1, last - self.mask)
            self._seen = last
            self._count(self.box.numbered(first, last))
        finally:
            self._lock.release()

    def _count(self, records: npt.NDArray[Any]) -> None:
        for number in np.flatnonzero(np.bincount(records["group"])).tolist():
            group = self._groups[number]
            if group is not None:
                group.tally.add(records[records["group"] == number])


class CommRecorder(Trace):
    """The calls of one communicator."""

    def __init__(self, recorder: Recorder, number: int, world: Sequence[int], rank: int) -> None:
        """Start with none."""
        self.recorder, self.number, self.world, self.rank = recorder, number, tuple(world), rank
        self.tally = Tally()
        self._sorts: dict[str, int] = {}
        self.begun = self.ended = 0
        """Calls."""

    def begin(self, name: str, signature: str) -> CallRecorder:
        """Begin to record a call; calls with the same signature are compared with each other."""
        self.begun += 1
        if len(self._sorts) >= MOST_SORTS:
            self._sorts.clear()
        sort = self._sorts.setdefault(signature, len(self._sorts))
        self.recorder.begun += 1
        return CallRecorder(self, name, sort, self.begun)


class CallRecorder(CallTrace):
    """The records of one call."""

    __slots__ = (
        *("_base", "_call", "_group", "_own", "_mask", "_memory", "_name", "_next", "_sort", "_world"),
        *("last", "met", "number", "posted", "started"),
    )

    def __init__(self, group: CommRecorder, name: str, sort: int, call: int) -> None:
        """Write its own record first."""
        recorder = group.recorder
        self._group, self._sort, self._call = group, sort, call & LOW
        self._memory, self._base, self._mask = recorder.memory, recorder.base, recorder.mask
        self._next, self._world, self._own = recorder.numbers.__next__, group.world, group.number
        self._name = recorder.box.name(name)
        self.last, self.started = -1, 0
        self.posted = self.met = perf_counter_ns()
        self.number = self._next()
        whole = self.posted, 0, 0, self.number, 0, 0, self._call, 0, -1, self._name, self._sort, 0, CALL, 0
        _pack(self._memory, self._place(self.number), *whole, self._own)

    def _place(self, number: int) -> int:
        return self._base + ((number & self._mask) << 6)

    # No tuple is unpacked into the calls below: that would take as long as the call itself.
    # fmt: off

    def sent(self, peer: int, posted: int, nbytes: int, lane: int, chunk: int, rail: int) -> None:
        """Record a chunk that has left."""
        number = self._next()
        _pack(self._memory, self._base + ((number & self._mask) << 6), posted, posted, perf_counter_ns(), number,
              nbytes, 0, self._call, chunk, self._world[peer], self._name, self._sort, lane, SEND, rail, self._own)

    def received(self, peer: int, posted: int, waited: int, nbytes: int, lane: int, chunk: int, rail: int) -> None:
        """Record a message that was taken; `waited` is since when the lane could not go on without it, or 0."""
        number = self._next()
        _pack(self._memory, self._base + ((number & self._mask) << 6), posted, waited, perf_counter_ns(), number,
              nbytes, 0, self._call, chunk, self._world[peer], self._name, self._sort, lane, RECV, rail, self._own)

    def coded(self, kind: int, posted: int, nbytes: int, raw_bytes: int, lane: int, chunk: int) -> None:
        """Record a chunk that was encoded or decoded, and when that was queued."""
        number = self._next()
        _pack(self._memory, self._base + ((number & self._mask) << 6), posted, posted, perf_counter_ns(), number,
              nbytes, raw_bytes & LOW, self._call, chunk, -1, self._name, self._sort, lane, kind, 0, self._own)

    # fmt: on

    def joined(self, peer: int) -> None:
        """Take notice of the neighbour that has joined last."""
        self.last, self.met = self._world[peer], perf_counter_ns()

    def start(self) -> None:
        """Record when all neighbours were there, and who came last."""
        self.started, at = perf_counter_ns(), self._place(self.number)
        if self._is_there(at):
            _pack_one(self._memory, at + TRANSMIT, self.met)
            _pack_peer(self._memory, at + PEER, self.last)
        self._group.tally.waited += self.met - self.posted

    def end(self, *, failed: bool) -> None:
        """Record that the call is over."""
        now, at, group = perf_counter_ns(), self._place(self.number), self._group
        if self._is_there(at):
            _pack_one(self._memory, at + COMPLETE, now)
        group.ended += 1
        group.recorder.ended += 1
        if failed:
            group.tally.forget()
        elif self.started:
            group.tally.calls.complete(now - self.met, self._sort)

    def _is_there(self, at: int) -> bool:
        """Say whether the call's own record is still in its place: the ring may have come round since."""
        return bool(_one(self._memory, at + NUMBER)[0] == self.number)
