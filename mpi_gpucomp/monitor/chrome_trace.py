"""The records of all ranks as Chrome trace events, for Perfetto: a row per rank, lane and kind of work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi_gpucomp.monitor.reader import aligned
from mpi_gpucomp.trace import CALL, DECODE, ENCODE, KINDS, RECV, SEND

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from mpi_gpucomp.monitor.trace_buffer import TraceBuffer

__all__ = ["spans", "trace"]

ROWS = {ENCODE: 0, SEND: 1, RECV: 2, DECODE: 3}
"""In the order in which a chunk passes them."""


def spans(records: npt.NDArray[Any]) -> list[tuple[int, int, dict[str, int]]]:
    """Return the start and end of the work on each record of a row, which works on one after the other."""
    found, last = [], 0
    names = records.dtype.names or ()
    for record in sorted(records.tolist(), key=lambda record: record[names.index("complete")]):
        one = dict(zip(names, record, strict=True))
        waits = one["transmit"] if one["kind"] == RECV and one["transmit"] else one["post"]
        found.append((max(waits, last), one["complete"], one))
        last = one["complete"]
    return found


def trace(buffers: Sequence[TraceBuffer]) -> dict[str, Any]:
    """Return the trace of all ranks, on the clock of the first."""
    records = aligned(buffers)
    first = min((int(some["post"].min()) for some in records if len(some)), default=0)
    events: list[dict[str, Any]] = []
    for buffer, some in zip(buffers, records, strict=True):
        events += _rank(buffer, some, first)
    headers = [buffer.header for buffer in buffers]
    uncertainty = max((header.uncertainty for header in headers), default=0)
    clocks = f"measured, within {uncertainty / 1e3:.0f} us"
    if any(header.uncertainty < 0 for header in headers):
        clocks = "wall clocks"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clocks": clocks, "ranks": str(len(buffers))}}


def _rank(buffer: TraceBuffer, records: npt.NDArray[Any], first: int) -> Iterator[dict[str, Any]]:
    header, names = buffer.header, buffer.names
    yield _meta("process_name", header.rank, 0, f"rank {header.rank} ({header.host})")
    yield {**_meta("process_sort_index", header.rank, 0, ""), "args": {"sort_index": header.rank}}
    for call in records[records["kind"] == CALL]:
        yield from _call(call, header.rank, names, first)
    work = records[records["kind"] != CALL]
    for lane, kind in sorted(set(work[["lane", "kind"]].tolist()), key=lambda row: (row[0], ROWS[row[1]])):
        row = 1 + lane * len(ROWS) + ROWS[kind]
        yield _meta("thread_name", header.rank, row, f"lane {lane}: {KINDS[kind]}")
        yield {**_meta("thread_sort_index", header.rank, row, ""), "args": {"sort_index": row}}
        for begin, end, one in spans(work[(work["lane"] == lane) & (work["kind"] == kind)]):
            yield _work(begin - first, end - begin, one, (header.rank, row), names)


def _meta(name: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": value}}


def _call(call: Any, rank: int, names: list[str], first: int) -> Iterator[dict[str, Any]]:
    """Yield the begin and end events of a call: calls may overlap."""
    title = f"{names[call['name']]} (call {call['call']})"
    common = {"cat": "call", "name": title, "id": f"{rank}.{call['comm']}.{call['call']}", "pid": rank, "tid": 0}
    joined = (int(call["transmit"]) - int(call["post"])) / 1e3 if call["transmit"] else None
    yield {**common, "ph": "b", "ts": (int(call["post"]) - first) / 1e3, "args": {"waited for ranks (us)": joined}}
    if call["complete"]:
        yield {**common, "ph": "e", "ts": (int(call["complete"]) - first) / 1e3}


def _work(begin: int, took: int, one: dict[str, int], row: tuple[int, int], names: list[str]) -> dict[str, Any]:
    kind = one["kind"]
    name = {SEND: f"to {one['peer']}", RECV: f"from {one['peer']}"}.get(kind, f"{KINDS[kind]} {one['chunk']}")
    args: dict[str, Any] = {"call": f"{names[one['name']]} (call {one['call']})", "bytes": one["nbytes"]}
    if kind in (SEND, RECV):
        posted = (one["complete"] - took - one["post"]) / 1e3
        args |= {"message": one["chunk"], "rail": one["rail"], "posted (us before)": posted}
    else:
        args |= {"raw bytes": one["raw_bytes"], "ratio": round(one["raw_bytes"] / max(1, one["nbytes"]), 3)}
    pid, tid = row
    return {
        **{"ph": "X", "cat": KINDS[kind], "name": name, "pid": pid, "tid": tid},
        **{"ts": begin / 1e3, "dur": took / 1e3, "args": args},
    }
