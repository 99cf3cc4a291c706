"""The black box of a process: a ring of records in memory, or in a file that other processes read while it is written.

A file is mapped, not written to: a record costs the same, and what was recorded is still there when the process is
killed. Everything that shows or judges what went on reads boxes, its own or those of other ranks.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpi_gpucomp import config
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.trace import CALL

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = [
    *("LAYOUT", "RECORD", "RECORDS"),
    *("TraceBuffer", "Head", "LinkState", "State"),
]

RECORD = np.dtype(
    [
        ("post", "<i8"),  # when it was asked for, in nanoseconds of this process's clock
        ("transmit", "<i8"),  # send: when the wire got it; receive: since when a lane waits; call: when all had joined
        ("complete", "<i8"),  # 0 for a call that is under way
        ("number", "<i8"),  # counts all records from 1, in the order of their completion; 0 for none
        ("nbytes", "<i8"),  # on the wire
        ("plain", "<u4"),  # as elements, where that is known
        ("call", "<u4"),  # which call of this communicator
        ("chunk", "<u4"),  # send, receive: which message of its lane; encode, decode: which loop
        ("peer", "<i4"),  # rank of the world; of a call, who joined last
        ("name", "<u2"),
        ("sort", "<u2"),  # calls of the same sort can be compared
        ("lane", "u1"),
        ("kind", "u1"),
        ("rail", "i1"),
        ("group", "u1"),  # which communicator of this process
    ]
)
LAYOUT = struct.Struct("<qqqqqIIIiHHBBbB")
"""The same, as the record path writes it: one call, no objects."""
assert LAYOUT.size == RECORD.itemsize == 64

RECORDS = config.RECORDS.default
"""Records that a box has room for, unless told otherwise: a megabyte."""
MAGIC = b"GPCBOX1\n"
_HEAD = struct.Struct("<8sIiiI64sqqqq")
_STATE = struct.Struct("<qqqqqqqq5q")
_LINK = struct.Struct("<iiqqddqii")
STATE_AT = 256
LINKS_AT, LINKS = 512, 64
NAMES_AT, NAME_BYTES, NAMES = 4096, 64, 256
ALARMS_AT, ALARM_BYTES, ALARMS = NAMES_AT + NAME_BYTES * NAMES, 512, 64
RING_AT = ALARMS_AT + ALARM_BYTES * ALARMS


@dataclass(frozen=True)
class Head:
    """Whose box it is, and how its clock relates to others."""

    rank: int
    size: int
    pid: int
    host: str
    started: int
    """Nanoseconds since 1970 when the clock stood at `clock`."""
    clock: int
    offset: int
    """What is added to this clock to get that of rank 0."""
    doubt: int
    """Nanoseconds by which the offset may be wrong; -1 where it was never measured, and wall clocks are compared."""


class State(NamedTuple):
    """How far a process is."""

    begun: int = 0
    ended: int = 0
    """Calls."""
    plain: int = 0
    encoded: int = 0
    """Bytes before and behind encoding."""
    waited: int = 0
    """Nanoseconds that calls have waited for ranks to join them."""
    closed: bool = False
    """Whether it has come to its end."""
    alarms: tuple[int, ...] = (0, 0, 0, 0, 0)
    """How many of each kind, see `judge.ALARM_KINDS`."""
    clock: int = 0
    wall: int = 0
    """When that was written, by its clock and since 1970; filled in by the box."""


class LinkState(NamedTuple):
    """A link as it is now."""

    peer: int
    rail: int
    chunks: int
    nbytes: int
    """That have left so far."""
    speed: float
    mean: float
    """Bytes a second, of the last window and before."""
    waiting: int
    """Bytes under way."""
    in_flight: int
    """Chunks under way."""
    slow: bool


class TraceBuffer:
    """The memory, and where everything is in it."""

    def __init__(self, memory: mmap.mmap, path: Path | None = None) -> None:
        """Read or write what is there; `make` and `open` return one."""
        self.memory, self.path = memory, path
        self.capacity = (len(memory) - RING_AT) // LAYOUT.size
        self.base = RING_AT
        self._names: dict[str, int] = {}
        self._alarms = 0

    @classmethod
    def make(cls, records: int = RECORDS, path: Path | None = None) -> TraceBuffer:
        """Make an empty one for a power of two of records, in memory of this process or in a file."""
        length = RING_AT + records * LAYOUT.size
        if path is None:
            return cls(mmap.mmap(-1, length))
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.ftruncate(descriptor, length)
            return cls(mmap.mmap(descriptor, length), path)
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: Path) -> TraceBuffer:
        """Read a file that a process has made, or is writing."""
        try:
            with path.open("rb") as file:
                box = cls(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), path)
        except (OSError, ValueError) as error:
            raise _unreadable(path, str(error)) from error
        if len(box.memory) < RING_AT or box.memory[: len(MAGIC)] != MAGIC:
            raise _unreadable(path, "something else")
        return box

    # Written once or seldom

    def begin(self, rank: int, size: int, host: str, offset: int = 0, doubt: int = -1) -> None:
        """Write whose box it is."""
        wall, clock = time.time_ns(), time.perf_counter_ns()
        name = host.encode()[:63]
        _HEAD.pack_into(self.memory, 0, MAGIC, 1, rank, size, os.getpid(), name, wall, clock, offset, doubt)

    def name(self, text: str) -> int:
        """Return the number of a name, which is written down the first time; all beyond the last share its number."""
        number = self._names.get(text)
        if number is None:
            number = self._names[text] = min(len(self._names), NAMES - 1)
            shown = text if len(self._names) < NAMES else "others"
            struct.pack_into(f"{NAME_BYTES}s", self.memory, NAMES_AT + number * NAME_BYTES, shown.encode()[:63])
        return number

    def alarm(self, text: str) -> None:
        """Keep the words of an alarm; the oldest make room."""
        at = ALARMS_AT + self._alarms % ALARMS * ALARM_BYTES
        self._alarms += 1
        said = text.encode()[: ALARM_BYTES - 17]
        struct.pack_into(f"<q{ALARM_BYTES - 8}s", self.memory, at, self._alarms, said)

    def write_state(self, state: State) -> None:
        """Write down how far the process is."""
        begun, ended, plain, encoded, waited, closed, alarms, *_ = state
        now = time.perf_counter_ns(), time.time_ns()
        _STATE.pack_into(self.memory, STATE_AT, begun, ended, plain, encoded, waited, closed, *now, *alarms)

    def write_links(self, links: Sequence[LinkState]) -> None:
        """Write down how the links are, the first of them if there are very many."""
        for place in range(LINKS):
            one = links[place] if place < len(links) else LinkState(-1, 0, 0, 0, 0.0, 0.0, 0, 0, False)
            _LINK.pack_into(self.memory, LINKS_AT + place * _LINK.size, *one)
            if one.peer < 0:
                break

    # Read

    @property
    def head(self) -> Head:
        """Read whose box it is."""
        _, _, rank, size, pid, host, started, clock, offset, doubt = _HEAD.unpack_from(self.memory)
        return Head(rank, size, pid, host.rstrip(b"\0").decode(errors="replace"), started, clock, offset, doubt)

    @property
    def state(self) -> State:
        """Read how far the process was, last time."""
        begun, ended, plain, encoded, waited, closed, clock, wall, *alarms = _STATE.unpack_from(self.memory, STATE_AT)
        return State(begun, ended, plain, encoded, waited, bool(closed), tuple(alarms), clock, wall)

    @property
    def links(self) -> list[LinkState]:
        """Read how the links were, last time."""
        found = []
        for place in range(LINKS):
            one = LinkState._make(_LINK.unpack_from(self.memory, LINKS_AT + place * _LINK.size))
            if one.peer < 0 or not one.chunks:
                break
            found.append(one._replace(slow=bool(one.slow)))
        return found

    @property
    def names(self) -> list[str]:
        """Return the names by their numbers."""
        whole = self.memory[NAMES_AT:ALARMS_AT]
        texts = (whole[at : at + NAME_BYTES] for at in range(0, len(whole), NAME_BYTES))
        return [text.rstrip(b"\0").decode(errors="replace") for text in texts]

    @property
    def alarms(self) -> list[str]:
        """Return the alarms that are kept, the oldest first."""
        found = (
            struct.unpack_from(f"<q{ALARM_BYTES - 8}s", self.memory, ALARMS_AT + place * ALARM_BYTES)
            for place in range(ALARMS)
        )
        return [text.rstrip(b"\0").decode(errors="replace") for number, text in sorted(found) if number]

    def records(self, since: int = 0) -> npt.NDArray[Any]:
        """Return a copy of what was complete since a time of its clock, and of the calls under way, in order."""
        ring: npt.NDArray[Any] = np.frombuffer(self.memory, RECORD, self.capacity, self.base)
        under_way = (ring["complete"] == 0) & (ring["kind"] == CALL)
        kept = ring[(ring["number"] != 0) & ((ring["complete"] >= since) | under_way)]
        ordered: npt.NDArray[Any] = kept[np.argsort(kept["post"], kind="stable")]
        return ordered

    def numbered(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return a copy of the records from one number up to another that are still there, in that order."""
        ring: npt.NDArray[Any] = np.frombuffer(self.memory, RECORD, self.capacity, self.base)
        start, end = first & (self.capacity - 1), last & (self.capacity - 1)
        found = ring[start:end] if start <= end else np.concatenate((ring[start:], ring[:end]))
        kept: npt.NDArray[Any] = found[(found["number"] >= first) & (found["number"] < last)]
        return kept


def _unreadable(path: Path, got: str) -> SpecError:
    return SpecError(
        f"file {path}",
        expected="a box of records",
        got=got,
        remedy="Name the directory that MPI_GPUCOMP_MONITOR was set to.",
    )
