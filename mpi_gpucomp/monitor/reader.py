"""Trace buffers of several ranks, read from a directory, with their clocks aligned."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.monitor.trace_buffer import FILES, TraceBuffer
from mpi_gpucomp.trace import DECODE, ENCODE, RECV, SEND

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

__all__ = ["Rates", "aligned", "is_alive", "newest", "rates", "shift"]

ALIVE_SECONDS = 3.0


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
