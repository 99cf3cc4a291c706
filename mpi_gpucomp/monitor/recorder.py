"""The recorder: writes the trace records of a process. It allocates nothing per chunk and takes no lock.

A chunk is recorded when it completes, by one write into preallocated memory. The core records the chunks of collectives
in the same ring; record numbers come from a counter that all writers share. Records are counted and compared later,
many at once (`links.py`). Work that is queued on a GPU gets a name besides, for Nsight Systems (NVTX).
"""

from __future__ import annotations

import ctypes
import struct
import threading
from contextlib import nullcontext
from itertools import count
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.monitor.links import CommCounters
from mpi_gpucomp.monitor.trace_buffer import LAYOUT, RECORD, TraceBuffer
from mpi_gpucomp.trace import CALL, RECV, SEND, CallTrace, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    import numpy.typing as npt


__all__ = ["CallRecorder", "CommRecorder", "Recorder", "gpu_range"]

_pack = LAYOUT.pack_into
_pack_int64 = struct.Struct("<q").pack_into
_pack_int32 = struct.Struct("<i").pack_into
_unpack_int64 = struct.Struct("<q").unpack_from
TRANSMIT, COMPLETE, NUMBER, PEER = (RECORD.fields[name][1] for name in ("transmit", "complete", "number", "peer"))  # type: ignore[index]
MAX_CLASSES, LOW = 1 << 16, 0xFFFFFFFF
MAX_COMMS = 256


class Recorder:
    """Writes the records of a process into its trace buffer, and counts them from time to time."""

    def __init__(self, buffer: TraceBuffer) -> None:
        """Begin with the first record."""
        self.buffer, self.memory = buffer, buffer.memory
        self.mask, self.base = buffer.capacity - 1, buffer.base
        self.next_number: Callable[[], int] = count(1).__next__
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(buffer.memory)) + buffer.base
        """Where the first record is."""
        self.begun = self.ended = 0
        """Calls."""
        self._comms: list[CommRecorder | None] = [None] * MAX_COMMS
        self._made = 0
        self._seen, self._lock = 0, threading.Lock()

    def communicator(self, world: Sequence[int], rank: int) -> CommRecorder:
        """Return the trace of a new communicator; `world` are its ranks in the world."""
        number = self._made % MAX_COMMS
        comm = self._comms[number] = CommRecorder(self, number, world, rank)
        self._made += 1
        return comm

    @property
    def comms(self) -> list[CommRecorder]:
        """Return the communicators, all but the oldest of very many."""
        return [comm for comm in self._comms if comm is not None]

    def collect(self) -> None:
        """Let every communicator count its new records; do nothing if another thread is doing so."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            last = self.next_number()
            first = max(self._seen + 1, last - self.mask)
            self._seen = last
            self._count(self.buffer.numbered(first, last))
        finally:
            self._lock.release()

    def _count(self, records: npt.NDArray[Any]) -> None:
        for number in np.flatnonzero(np.bincount(records["comm"])).tolist():
            comm = self._comms[number]
            if comm is not None:
                comm.counters.add(records[records["comm"] == number])


class CommRecorder(Trace):
    """The trace of one communicator."""

    def __init__(self, recorder: Recorder, number: int, world: Sequence[int], rank: int) -> None:
        """Start with no calls."""
        self.recorder, self.number, self.world, self.rank = recorder, number, tuple(world), rank
        self.counters = CommCounters()
        self.world_array = (ctypes.c_int32 * len(self.world))(*self.world)
        self._classes: dict[str, int] = {}
        self.begun = self.ended = 0
        """Calls."""

    def share_numbers(self, next_number: Callable[[], int]) -> None:
        """Take the numbers of records from here: the core writes records too."""
        self.recorder.next_number = next_number

    def begin(self, name: str, signature: str) -> CallRecorder:
        """Begin to record a call; calls with the same signature are of one class."""
        self.begun += 1
        if len(self._classes) >= MAX_CLASSES:
            self._classes.clear()
        call_class = self._classes.setdefault(signature, len(self._classes))
        self.recorder.begun += 1
        return CallRecorder(self, name, call_class, self.begun)


class CallRecorder(CallTrace):
    """The trace of one call."""

    __slots__ = (
        *("_base", "_call", "_call_class", "_comm", "_comm_number", "_mask", "_memory", "_name", "_next", "_world"),
        *("all_joined", "last", "number", "posted", "started"),
    )

    def __init__(self, comm: CommRecorder, name: str, call_class: int, call: int) -> None:
        """Write the record of the call itself."""
        recorder = comm.recorder
        self._comm, self._call_class, self._call = comm, call_class, call & LOW
        self._memory, self._base, self._mask = recorder.memory, recorder.base, recorder.mask
        self._next, self._world, self._comm_number = recorder.next_number, comm.world, comm.number
        self._name = recorder.buffer.name(name)
        self.last, self.started = -1, 0
        self.posted = self.all_joined = perf_counter_ns()
        self.number = self._next()
        fields = self.posted, 0, 0, self.number, 0, 0, self._call, 0, -1, self._name, self._call_class, 0, CALL, 0
        _pack(self._memory, self._place(self.number), *fields, self._comm_number)

    @property
    def ring(self) -> tuple[int, ...]:
        """Return where and how the core writes records of this call."""
        records, world = self._comm.recorder.address, ctypes.addressof(self._comm.world_array)
        return records, self._mask, world, self._call, self._name, self._call_class, self._comm_number

    def _place(self, number: int) -> int:
        return self._base + ((number & self._mask) << 6)

    # The arguments are written out: to unpack a tuple would take as long as the call itself.
    # fmt: off

    def sent(self, peer: int, posted: int, nbytes: int, lane: int, chunk: int, rail: int) -> None:
        """Record a completed send."""
        number = self._next()
        _pack(self._memory, self._base + ((number & self._mask) << 6), posted, posted, perf_counter_ns(), number,
              nbytes, 0, self._call, chunk, self._world[peer], self._name, self._call_class, lane, SEND, rail,
              self._comm_number)

    def received(self, peer: int, posted: int, waited: int, nbytes: int, lane: int, chunk: int, rail: int) -> None:
        """Record a completed receive; `waited` is when the lane first blocked on it, or 0."""
        number = self._next()
        _pack(self._memory, self._base + ((number & self._mask) << 6), posted, waited, perf_counter_ns(), number,
              nbytes, 0, self._call, chunk, self._world[peer], self._name, self._call_class, lane, RECV, rail,
              self._comm_number)

    def coded(self, kind: int, posted: int, nbytes: int, raw_bytes: int, lane: int, chunk: int) -> None:
        """Record a chunk that was encoded or decoded; `posted` is when that was queued."""
        number = self._next()
        _pack(self._memory, self._base + ((number & self._mask) << 6), posted, posted, perf_counter_ns(), number,
              nbytes, raw_bytes & LOW, self._call, chunk, -1, self._name, self._call_class, lane, kind, 0,
              self._comm_number)

    # fmt: on

    def joined(self, peer: int) -> None:
        """Note the neighbour that has joined last."""
        self.last, self.all_joined = self._world[peer], perf_counter_ns()

    def start(self) -> None:
        """Record when all neighbours had joined, and which one was last."""
        self.started, at = perf_counter_ns(), self._place(self.number)
        if self._is_kept(at):
            _pack_int64(self._memory, at + TRANSMIT, self.all_joined)
            _pack_int32(self._memory, at + PEER, self.last)
        self._comm.counters.join_wait += self.all_joined - self.posted

    def end(self, *, failed: bool) -> None:
        """Record the end of the call."""
        now, at, comm = perf_counter_ns(), self._place(self.number), self._comm
        if self._is_kept(at):
            _pack_int64(self._memory, at + COMPLETE, now)
        comm.ended += 1
        comm.recorder.ended += 1
        if failed:
            comm.counters.forget()
        elif self.started:
            comm.counters.calls.complete(now - self.all_joined, self._call_class)

    def _is_kept(self, at: int) -> bool:
        """Return True if the record of the call itself is not overwritten."""
        return bool(_unpack_int64(self._memory, at + NUMBER)[0] == self.number)


class _Range:
    """A range that can be entered again and again."""

    def __init__(self, name: str, nvtx: Any) -> None:
        self._name, self._push, self._pop = name, nvtx.RangePush, nvtx.RangePop

    def __enter__(self) -> None:
        self._push(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pop()


def gpu_range(name: str, device: str) -> AbstractContextManager[None]:
    """Return what gives work on a device a name, for the length of each `with`."""
    if not device.startswith("cuda"):
        return nullcontext()
    try:
        from cupy.cuda import nvtx
    except ImportError:
        return nullcontext()
    return _Range(f"gpucomp {name}", nvtx)
