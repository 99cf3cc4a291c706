"""The trace buffer of a process, a ring of records in memory or in a file, and the buffers of several ranks together.

A file is mapped, not written to: a record costs the same, and the records survive if the process is killed. Everything
that displays or diagnoses reads trace buffers, its own or those of other ranks. A file is validated when it is opened;
records that are half written or damaged are left out, and a file with many of them is an error. The buffers of several
ranks are read from a directory, with their clocks aligned.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import time
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpi_gpucomp.config import MAX_RECORDS
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.monitor import files
from mpi_gpucomp.trace import CALL, DECODE, ENCODE, KINDS, RECV, SEND

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


__all__ = [
    "FILES",
    "LAYOUT",
    "RECORD",
    "RECORDS",
    "LinkState",
    "ProcessState",
    "Rates",
    "TraceBuffer",
    "TraceHeader",
    "aligned",
    "is_alive",
    "newest",
    "rates",
    "shift",
]

RECORD = np.dtype(
    [
        ("post", "<i8"),  # when it was posted, in nanoseconds of this process's clock
        ("transmit", "<i8"),  # send: when it was posted; receive: when its lane blocked; call: when all had joined
        ("complete", "<i8"),  # 0 for a call in progress
        ("number", "<i8"),  # counts all records from 1, in the order of completion; 0 for an empty place
        ("nbytes", "<i8"),  # on the wire
        ("raw_bytes", "<u4"),  # not encoded, where known
        ("call", "<u4"),  # which call of its communicator
        ("chunk", "<u4"),  # send, receive: which message of its lane; encode, decode: which loop
        ("peer", "<i4"),  # rank in the world; of a call, the rank that joined last
        ("name", "<u2"),
        ("call_class", "<u2"),  # calls of the same class are comparable
        ("lane", "u1"),
        ("kind", "u1"),
        ("rail", "i1"),
        ("comm", "u1"),  # which communicator of this process
    ]
)
LAYOUT = struct.Struct("<qqqqqIIIiHHBBbB")
"""The same, for the recorder: one call, no objects."""
assert LAYOUT.size == RECORD.itemsize == 64
FILES = "*.trace"
RECORDS = 1 << 14
"""Records of a trace buffer by default: one megabyte."""
MIN_RECORDS = 64
MAGIC, VERSION = b"GPCBOX1\n", 1
_HEADER = struct.Struct("<8sIiiI64sqqqq")
_STATE = struct.Struct("<qqqqqqqq5q")
_LINK = struct.Struct("<iiqqddqii")
STATE_AT = 256
LINKS_AT, LINKS = 512, 64
NAMES_AT, NAME_BYTES, NAMES = 4096, 64, 256
ALARMS_AT, ALARM_BYTES, ALARMS = NAMES_AT + NAME_BYTES * NAMES, 512, 64
RING_AT = ALARMS_AT + ALARM_BYTES * ALARMS
MAX_RANKS = 1 << 24
MAX_TORN = 16
"""Records that may be half written while a file is read; with more the file is damaged."""

ALIVE_SECONDS = 3.0


@dataclass(frozen=True)
class TraceHeader:
    """The process that a trace buffer belongs to, and how its clock relates to others."""

    rank: int
    size: int
    pid: int
    host: str
    started: int
    """Nanoseconds since 1970 when the clock read `clock`."""
    clock: int
    offset: int
    """Added to this clock, it gives that of rank 0."""
    uncertainty: int
    """Nanoseconds by which the offset may be wrong; -1 if it was not measured, and wall clocks are compared."""


class ProcessState(NamedTuple):
    """Totals of a process."""

    begun: int = 0
    ended: int = 0
    """Calls."""
    raw_bytes: int = 0
    encoded_bytes: int = 0
    """Before and after encoding."""
    join_wait: int = 0
    """Nanoseconds that calls have waited for ranks to join them."""
    closed: bool = False
    """Whether the process has ended."""
    alarms: tuple[int, ...] = (0, 0, 0, 0, 0)
    """The number of each kind, see `diagnosis.ALARM_KINDS`."""
    clock: int = 0
    wall: int = 0
    """When this was written, by its clock and since 1970; set by the trace buffer."""


class LinkState(NamedTuple):
    """A link as it is now."""

    peer: int
    rail: int
    chunks: int
    nbytes: int
    """Totals of completed sends."""
    bandwidth: float
    mean: float
    """Bytes per second, in the last window and before."""
    bytes_in_flight: int
    chunks_in_flight: int
    slow: bool


class TraceBuffer:
    """The memory of a trace buffer and its layout."""

    def __init__(self, memory: mmap.mmap, path: Path | None = None) -> None:
        """Read or write this memory; `make` and `open` return one."""
        self.memory, self.path = memory, path
        self.capacity = (len(memory) - RING_AT) // LAYOUT.size
        self.base = RING_AT
        self._names: dict[str, int] = {}
        self._alarms = 0
        self._is_own = True

    @classmethod
    def make(cls, records: int = RECORDS, path: Path | None = None) -> TraceBuffer:
        """Make an empty one for a power of two of records, in memory of this process or in a file."""
        length = RING_AT + records * LAYOUT.size
        if path is None:
            return cls(mmap.mmap(-1, length))
        descriptor = files.create(path)
        try:
            os.ftruncate(descriptor, length)
            return cls(mmap.mmap(descriptor, length), path)
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: Path) -> TraceBuffer:
        """Open a file that a process has made, or is writing; raise SpecError if it is no trace."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise _invalid(path, "something that is not a file")
                if status.st_size < RING_AT + MIN_RECORDS * LAYOUT.size:
                    raise _invalid(path, f"{status.st_size} bytes, which is too short")
                buffer = cls(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), path)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            if isinstance(error, SpecError):
                raise
            raise _invalid(path, str(error)) from error
        buffer._is_own = False
        buffer._validate(path)
        return buffer

    def _validate(self, path: Path) -> None:
        """Raise SpecError unless the header, the length and the state are those of a trace."""
        magic, version, *_ = _HEADER.unpack_from(self.memory)
        capacity, rest = divmod(len(self.memory) - RING_AT, LAYOUT.size)
        if magic != MAGIC:
            raise _invalid(path, "a file of another kind")
        if version != VERSION:
            raise _invalid(path, f"version {version}, this library reads version {VERSION}")
        if rest or capacity & (capacity - 1) or capacity > MAX_RECORDS:
            raise _invalid(path, f"{len(self.memory)} bytes, which is no whole ring of records")
        header = self.header
        if not 0 <= header.rank < header.size <= MAX_RANKS:
            raise _invalid(path, f"rank {header.rank} of {header.size}")
        if min(header.started, header.clock) < 0 or header.uncertainty < -1 or min(self.state[:5]) < 0:
            raise _invalid(path, "a header with negative times or totals")
        if not all(isfinite(link.bandwidth) and isfinite(link.mean) for link in self.links):
            raise _invalid(path, "links whose bandwidth is no number")
        ring = self._ring()
        torn = int((ring["number"] != 0).sum() - _is_whole(ring).sum())
        if torn > MAX_TORN:
            raise _invalid(path, f"{torn} damaged records")

    # Written once or rarely

    def begin(self, rank: int, size: int, host: str, offset: int = 0, uncertainty: int = -1) -> None:
        """Write the header."""
        wall, clock = time.time_ns(), time.perf_counter_ns()
        name = host.encode()[:63]
        _HEADER.pack_into(
            self.memory, 0, MAGIC, VERSION, rank, size, os.getpid(), name, wall, clock, offset, uncertainty
        )

    def name(self, text: str) -> int:
        """Return the number of a name, which is written the first time; all names beyond the last share its number."""
        number = self._names.get(text)
        if number is None:
            number = self._names[text] = min(len(self._names), NAMES - 1)
            shown = text if len(self._names) < NAMES else "others"
            struct.pack_into(f"{NAME_BYTES}s", self.memory, NAMES_AT + number * NAME_BYTES, shown.encode()[:63])
        return number

    def alarm(self, text: str) -> None:
        """Write the text of an alarm; it replaces the oldest one if there is no room."""
        at = ALARMS_AT + self._alarms % ALARMS * ALARM_BYTES
        self._alarms += 1
        struct.pack_into(f"<q{ALARM_BYTES - 8}s", self.memory, at, self._alarms, text.encode()[: ALARM_BYTES - 17])

    def write_state(self, state: ProcessState) -> None:
        """Write the totals of the process."""
        begun, ended, raw_bytes, encoded, join_wait, closed, alarms, *_ = state
        now = time.perf_counter_ns(), time.time_ns()
        _STATE.pack_into(self.memory, STATE_AT, begun, ended, raw_bytes, encoded, join_wait, closed, *now, *alarms)

    def write_links(self, links: Sequence[LinkState]) -> None:
        """Write the state of the links; of the first ones if there are very many."""
        for place in range(LINKS):
            link = links[place] if place < len(links) else LinkState(-1, 0, 0, 0, 0.0, 0.0, 0, 0, False)
            _LINK.pack_into(self.memory, LINKS_AT + place * _LINK.size, *link)
            if link.peer < 0:
                break

    # Read

    @property
    def header(self) -> TraceHeader:
        """Read the header."""
        _, _, rank, size, pid, host, started, clock, offset, uncertainty = _HEADER.unpack_from(self.memory)
        return TraceHeader(rank, size, pid, _text(host), started, clock, offset, uncertainty)

    @property
    def state(self) -> ProcessState:
        """Read the totals of the process, as last written."""
        begun, ended, raw_bytes, encoded, join_wait, closed, clock, wall, *alarms = _STATE.unpack_from(
            self.memory, STATE_AT
        )
        return ProcessState(begun, ended, raw_bytes, encoded, join_wait, bool(closed), tuple(alarms), clock, wall)

    @property
    def links(self) -> list[LinkState]:
        """Read the state of the links, as last written."""
        found = []
        for place in range(LINKS):
            link = LinkState._make(_LINK.unpack_from(self.memory, LINKS_AT + place * _LINK.size))
            if link.peer < 0 or not link.chunks:
                break
            found.append(link._replace(slow=bool(link.slow)))
        return found

    @property
    def names(self) -> list[str]:
        """Return the names by their numbers."""
        names = self.memory[NAMES_AT:ALARMS_AT]
        return [_text(names[at : at + NAME_BYTES]) for at in range(0, len(names), NAME_BYTES)]

    @property
    def alarms(self) -> list[str]:
        """Return the texts of the alarms, the oldest first."""
        found = (
            struct.unpack_from(f"<q{ALARM_BYTES - 8}s", self.memory, ALARMS_AT + place * ALARM_BYTES)
            for place in range(ALARMS)
        )
        return [_text(text) for number, text in sorted(found) if number]

    def _ring(self) -> npt.NDArray[Any]:
        ring: npt.NDArray[Any] = np.frombuffer(self.memory, RECORD, self.capacity, self.base)
        return ring

    def records(self, since: int = 0) -> npt.NDArray[Any]:
        """Return a copy of the records completed since a time of its clock, and of calls in progress, in order."""
        ring = self._ring()
        in_progress = (ring["complete"] == 0) & (ring["kind"] == CALL)
        kept = ring[(ring["number"] != 0) & ((ring["complete"] >= since) | in_progress)]
        if not self._is_own:
            kept = kept[_is_whole(kept)]
        ordered: npt.NDArray[Any] = kept[np.argsort(kept["post"], kind="stable")]
        return ordered

    def numbered(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return a copy of the records from one number up to another that are not overwritten, in that order."""
        ring = self._ring()
        start, end = first & (self.capacity - 1), last & (self.capacity - 1)
        found = ring[start:end] if start <= end else np.concatenate((ring[start:], ring[:end]))
        kept: npt.NDArray[Any] = found[(found["number"] >= first) & (found["number"] < last)]
        return kept


def _is_whole(records: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which records are neither empty, half written nor damaged."""
    complete, post = records["complete"], records["post"]
    is_call = records["kind"] == CALL
    whole: npt.NDArray[np.bool_] = (
        (records["number"] > 0)
        & np.isin(records["kind"], list(KINDS))
        & (records["name"] < NAMES)
        & (records["nbytes"] >= 0)
        & (records["peer"] >= -1)
        & (post >= 0)
        & (records["transmit"] >= 0)
        & ((complete >= post) | (is_call & (complete == 0)))
    )
    return whole


def _text(encoded: bytes) -> str:
    """Return the text of a field; characters that a terminal would act on are replaced."""
    text = encoded.partition(b"\0")[0].decode(errors="replace")
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def _invalid(path: Path, got: str) -> SpecError:
    return SpecError(
        f"file {path}",
        expected="a trace that a rank has written",
        got=got,
        remedy="Name the directory that MPI_GPUCOMP_MONITOR was set to, and remove damaged files from it.",
    )


def newest(directory: Path) -> list[TraceBuffer]:
    """Open the newest trace of each rank, in the order of ranks."""
    found: dict[int, TraceBuffer] = {}
    for path in sorted(directory.glob(FILES)):
        buffer = TraceBuffer.open(path)
        header = buffer.header
        if header.rank not in found or header.started > found[header.rank].header.started:
            found[header.rank] = buffer
    if not found:
        raise SpecError(
            f"directory {directory}",
            expected=f"traces of ranks ({FILES})",
            got="none",
            remedy="Set MPI_GPUCOMP_MONITOR to a directory for the run, and name it here.",
        )
    # Higher ranks are left over from a run that had more.
    size = max(found.values(), key=lambda buffer: buffer.header.started).header.size
    return [buffer for rank, buffer in sorted(found.items()) if rank < size]


def shift(buffers: Sequence[TraceBuffer]) -> list[int]:
    """Return what to add to each clock to align them, in nanoseconds since 1970.

    Where the offsets were measured, all follow the wall clock of the first; otherwise each follows its own.
    """
    headers = [buffer.header for buffer in buffers]
    if any(header.uncertainty < 0 for header in headers):
        return [header.started - header.clock for header in headers]
    first = headers[0]
    return [first.started - first.clock - first.offset + header.offset for header in headers]


def aligned(buffers: Sequence[TraceBuffer], since: int = 0) -> list[npt.NDArray[Any]]:
    """Return the records of each trace, completed since a common time, with aligned times."""
    found = []
    for buffer, added in zip(buffers, shift(buffers), strict=True):
        records = buffer.records(since - added if since else 0)
        for name in ("post", "transmit", "complete"):
            records[name] += np.where(records[name] > 0, added, 0)
        found.append(records)
    return found


def is_alive(buffer: TraceBuffer) -> bool:
    """Return True if the process of a trace has a recent heartbeat."""
    state = buffer.state
    return not state.closed and time.time() - state.wall / 1e9 < ALIVE_SECONDS


class Rates(NamedTuple):
    """The rates of a rank, in bytes per second."""

    sent: float
    received: float
    encoded: float
    decoded: float
    """Of raw bytes."""
    to: dict[tuple[int, int], float]
    """Sent to each peer, by rank and rail."""


def rates(buffer: TraceBuffer, seconds: float) -> Rates:
    """Return the rates in the last seconds before the last heartbeat."""
    now = buffer.state.clock
    records = buffer.records(now - round(seconds * 1e9)) if now else buffer.records()[:0]

    def total(kind: int, field: str = "nbytes") -> float:
        return float(records[field][records["kind"] == kind].sum(dtype=np.int64)) / seconds

    sends = records[records["kind"] == SEND]
    to = {
        (peer, rail): float(sends["nbytes"][(sends["peer"] == peer) & (sends["rail"] == rail)].sum()) / seconds
        for peer, rail in set(sends[["peer", "rail"]].tolist())
    }
    return Rates(total(SEND), total(RECV), total(ENCODE, "raw_bytes"), total(DECODE, "raw_bytes"), to)
