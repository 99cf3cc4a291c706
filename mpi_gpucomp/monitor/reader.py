"""Boxes of several ranks, read from a directory, with their clocks brought together."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.monitor.trace_buffer import TraceBuffer
from mpi_gpucomp.trace import DECODE, ENCODE, RECV, SEND

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

__all__ = ["Rates", "aligned", "is_alive", "newest", "rates", "shift"]

ALIVE_SECONDS = 3.0


def newest(directory: Path) -> list[TraceBuffer]:
    """Open the newest box of each rank, in the order of ranks."""
    found: dict[int, TraceBuffer] = {}
    for path in sorted(directory.glob("*.box")):
        box = TraceBuffer.open(path)
        head = box.head
        if head.rank not in found or head.started > found[head.rank].head.started:
            found[head.rank] = box
    if not found:
        raise SpecError(
            f"directory {directory}",
            expected="boxes of records (*.box)",
            got="none",
            remedy="Set MPI_GPUCOMP_MONITOR to a directory for the run, and name it here.",
        )
    # Those of a run that had more ranks are not of this one.
    size = max(found.values(), key=lambda box: box.head.started).head.size
    return [box for rank, box in sorted(found.items()) if rank < size]


def shift(boxes: Sequence[TraceBuffer]) -> list[int]:
    """Return what to add to each clock to have them all together, in nanoseconds since 1970.

    Where the differences were measured, all follow the wall clock of the first; else each its own.
    """
    heads = [box.head for box in boxes]
    if any(head.doubt < 0 for head in heads):
        return [head.started - head.clock for head in heads]
    first = heads[0]
    return [first.started - first.clock - first.offset + head.offset for head in heads]


def aligned(boxes: Sequence[TraceBuffer], since: int = 0) -> list[npt.NDArray[Any]]:
    """Return the records of each box, complete since a time that all share, with their times in it."""
    found = []
    for box, added in zip(boxes, shift(boxes), strict=True):
        records = box.records(since - added if since else 0)
        for name in ("post", "transmit", "complete"):
            records[name] += np.where(records[name] > 0, added, 0)
        found.append(records)
    return found


def is_alive(box: TraceBuffer) -> bool:
    """Say whether a process has written to its box of late."""
    state = box.state
    return not state.closed and time.time() - state.wall / 1e9 < ALIVE_SECONDS


class Rates(NamedTuple):
    """What a rank did in the last second, in bytes a second."""

    sent: float
    received: float
    encoded: float
    decoded: float
    """Of elements."""
    to: dict[tuple[int, int], float]
    """Sent to each peer, by rank and rail."""


def rates(box: TraceBuffer, seconds: float) -> Rates:
    """Sum up the last seconds before a box was last written to."""
    now = box.state.clock
    records = box.records(now - round(seconds * 1e9)) if now else box.records()[:0]

    def total(kind: int, field: str = "nbytes") -> float:
        return float(records[field][records["kind"] == kind].sum(dtype=np.int64)) / seconds

    sends = records[records["kind"] == SEND]
    to = {
        (peer, rail): float(sends["nbytes"][(sends["peer"] == peer) & (sends["rail"] == rail)].sum()) / seconds
        for peer, rail in set(sends[["peer", "rail"]].tolist())
    }
    return Rates(total(SEND), total(RECV), total(ENCODE, "plain"), total(DECODE, "plain"), to)
