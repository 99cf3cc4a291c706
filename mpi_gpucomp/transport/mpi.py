"""Messages over MPI, on duplicates of the caller's communicator, so that tags cannot collide with the caller's."""

from __future__ import annotations

import ctypes
import time
from functools import cache
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpi_gpucomp.core.library import MpiLibrary, Segmentation, core
from mpi_gpucomp.core.wire import Wire
from mpi_gpucomp.errors import GpucompError, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Set

__all__ = ["SEGMENT_BYTES", "MpiComms", "MpiWire", "dead_ranks", "drive_mpi", "lost", "means_death", "revoke"]

SEGMENT_BYTES = (1 << 16) - 256
"""Default bytes of a segment: with its header, the largest message that Open MPI sends eagerly over TCP."""
MAX_SEGMENTS = 1 << 12
"""The largest number of segments that follow the first one."""
SLOW = 160e6
"""Bytes per second up to which a link is slow, such as one of 1 Gbit/s: messages on faster ones are not segmented."""
SOURCE, TAG = 0x5A5A1, 0x5A5A2

FAILURES = tuple(
    getattr(MPI, name)
    for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
    if getattr(MPI, name, MPI.ERR_UNKNOWN) != MPI.ERR_UNKNOWN
)
"""Error classes of a process failure, in an MPI library with fault tolerance (ULFM)."""
NAMING_SECONDS = 1.0
"""How long to poll for the failed ranks: a rank that sees a revoked communicator may learn of the cause later."""


def means_death(error: MPI.Exception, comm: MPI.Intracomm) -> bool:
    """Return True if an MPI error is due to a failed rank; some ranks see only "another error"."""
    if isinstance(error, GpucompError):  # named already
        return False
    return error.Get_error_class() in FAILURES or bool(dead_ranks(comm))


def lost(error: MPI.Exception, rank: int, comm: MPI.Intracomm = MPI.COMM_SELF) -> RankFailedError:
    """Convert an MPI error into ours, which names the failed ranks of `comm`."""
    died, text = means_death(error, comm), f"MPI error: {error.Get_error_string()}"
    dead = _wait_for_dead_ranks(comm) if died and comm.size > 1 else []
    who = f"rank{'s' * (len(dead) > 1)} {', '.join(map(str, dead))} dead ({text})"
    return RankFailedError(
        "communicator",
        expected="all ranks alive",
        got=who if dead else text,
        remedy="Continue without them: new = comm.Shrink()." if died else "See the errors of MPI on the other ranks.",
        rank=rank,
    )


def _wait_for_dead_ranks(comm: MPI.Intracomm) -> list[int]:
    deadline = time.monotonic() + NAMING_SECONDS
    while not (dead := dead_ranks(comm)) and time.monotonic() < deadline:
        MPI.COMM_SELF.Iprobe()  # drives MPI's progress
        time.sleep(1e-3)
    return dead


def dead_ranks(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks that MPI reports as failed; empty without fault tolerance."""
    try:
        failed = comm.Get_failed()
        return sorted(failed.Translate_ranks(range(failed.size), comm.Get_group()))
    except (MPI.Exception, NotImplementedError):
        return []


@cache
def _library() -> tuple[MpiLibrary, Any]:
    """Return the functions and constants of the MPI library that mpi4py has loaded."""
    loaded = ctypes.CDLL(MPI.__file__)

    def address(name: str) -> int | None:
        try:
            return ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value
        except AttributeError:
            return None

    names = ("Isend", "Issend", "Irecv", "Test", "Cancel", "Test_cancelled", "Get_count", "Iprobe", "Improbe")
    longs = ("Isend_c", "Issend_c", "Irecv_c", "Imrecv_c", "Get_count_c")
    functions = {name.lower(): address(f"MPI_{name}") for name in (*names, "Imrecv", *longs)}
    status = MPI.Status()
    status.source, status.tag = SOURCE, TAG
    nbytes = MPI._sizeof(status)
    fields = ctypes.string_at(MPI._addressof(status), nbytes)
    offsets = (fields.index(value.to_bytes(4, "little")) for value in (SOURCE, TAG))
    numbers = zip(("source_offset", "tag_offset"), offsets, strict=True)
    known = MpiLibrary(
        **functions,
        byte_type=_handle(MPI.BYTE),
        any_source=MPI.ANY_SOURCE,
        any_tag=MPI.ANY_TAG,
        status_bytes=nbytes,
        undefined=MPI.UNDEFINED,
        count_error=MPI.ERR_COUNT,
        **dict(numbers),
    )
    return known, loaded


def _handle(value: Any) -> int:
    """Return MPI's handle: a pointer or an integer, which fit the same register."""
    return int.from_bytes(ctypes.string_at(MPI._addressof(value), MPI._sizeof(value)), "little")


def _largest_tag(comm: MPI.Intracomm) -> int:
    largest = comm.Get_attr(MPI.TAG_UB)
    return min(largest, (1 << 31) - 1) if isinstance(largest, int) else 32767


class MpiComms:
    """The duplicates of a communicator that a wire uses: for messages, segments and control messages."""

    def __init__(self, comm: MPI.Intracomm, segment_bytes: int = 0, remote: Set[int] = frozenset()) -> None:
        """Make the duplicates and the wire: collective."""
        self._caller, self.messages, self._control = comm, comm.Dup(), comm.Dup()
        self.segments = comm.Dup() if segment_bytes else self.messages
        self.largest_tag = _largest_tag(self.messages)
        peers = (ctypes.c_int32 * len(remote))(*remote)
        comms = (_handle(one) for one in (self.messages, self.segments, self._control))
        cut, known = Segmentation(segment_bytes, MAX_SEGMENTS, SLOW), _library()[0]
        self.wire: int = core().gc_mpi_wire(
            *(
                ctypes.byref(known),
                comm.rank,
                comm.size,
                self.largest_tag,
                *comms,
                ctypes.byref(cut),
                peers,
                len(remote),
            )
        )

    def revoke(self, *others: MPI.Intracomm) -> None:
        """Revoke the duplicates and the caller's communicator, in which peers may be blocked in native MPI calls.

        An MPI library without fault tolerance leaves it to its launcher to end the job.
        """
        revoke(self._caller, self.messages, self.segments, self._control, *others)

    def free(self) -> None:
        """Free the duplicates; collective."""
        if self.segments is not self.messages:
            self.segments.Free()
        self.messages.Free()
        self._control.Free()


def drive_mpi(wire: Wire) -> None:
    """Let waits of a wire that is not MPI's progress MPI too: peers may be blocked in it for what this rank sent."""
    comms = _handle(MPI.COMM_SELF), _handle(MPI.COMM_WORLD)
    core().gc_context_drive_mpi(wire.handle, ctypes.byref(_library()[0]), *comms, _largest_tag(MPI.COMM_WORLD))


def revoke(*comms: MPI.Intracomm) -> None:
    """Revoke communicators, where MPI can."""
    for comm in comms:
        try:
            comm.Revoke()
        except (MPI.Exception, NotImplementedError):
            return


class MpiWire(Wire):
    """Messages with the other ranks of an MPI communicator."""

    def __init__(
        self, comm: MPI.Intracomm, segment_bytes: int = 0, remote: Set[int] = frozenset(), why: str = ""
    ) -> None:
        """Duplicate the communicator for messages and for control messages; collective.

        Long messages to and from `remote` peers are sent in segments of `segment_bytes`, unless that is 0.
        """
        self._comms = MpiComms(comm, segment_bytes, remote)
        self._segments = segment_bytes > 0
        super().__init__(self._comms.wire, comm.rank, comm.size, self._comms.largest_tag)
        self.kind, self.why = "mpi", why

    def relays(self, bytes_per_second: float) -> bool:
        """Return True if messages are segmented on such links: segments are forwarded as they arrive."""
        return self._segments and bytes_per_second <= SLOW

    def error(self) -> GpucompError:
        """Return MPI's error as ours, which names the failed ranks."""
        code, _ = self.fault()
        return lost(MPI.Exception(code), self.rank, self._comms.messages)

    def revoke(self) -> None:
        """Make pending and later calls of every rank fail, where MPI can."""
        self._comms.revoke(*self.derived_comms)

    def close(self) -> None:
        """Free the duplicates; collective."""
        while not core().gc_closed(self.handle):
            time.sleep(1e-4)
        self._comms.free()
        super().close()
