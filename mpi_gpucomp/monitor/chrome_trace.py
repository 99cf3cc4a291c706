"""Records of all ranks as Chrome trace events, which Perfetto opens: a row for each rank, lane and kind of work."""

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
"""In the order of a chunk's way."""


def spans(records: npt.NDArray[Any]) -> list[tuple[int, int, dict[str, int]]]:
    """Return when the work of one row was at each record: from when it was there, and the one before was over."""
    found, last = [], 0
    names = records.dtype.names or ()
    for record in sorted(records.tolist(), key=lambda record: record[names.index("complete")]):
        one = dict(zip(names, record, strict=True))
        waits = one["transmit"] if one["kind"] == RECV and one["transmit"] else one["post"]
        found.append((max(waits, last), one["complete"], one))
        last = one["complete"]
    return found


def trace(boxes: Sequence[TraceBuffer]) -> dict[str, Any]:
    """Make the trace of all ranks, on the clock of the first."""
    records = aligned(boxes)
    first = min((int(some["post"].min()) for some in records if len(some)), default=0)
    events: list[dict[str, Any]] = []
    for box, some in zip(boxes, records, strict=True):
        events += _rank(box, some, first)
    heads = [box.head for box in boxes]
    doubt = max((head.doubt for head in heads), default=0)
    said = "wall clocks" if any(head.doubt < 0 for head in heads) else f"measured, within {doubt / 1e3:.0f} us"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clocks": said, "ranks": str(len(boxes))}}


def _rank(box: TraceBuffer, records: npt.NDArray[Any], first: int) -> Iterator[dict[str, Any]]:
    head, names = box.head, box.names
    yield _meta("process_name", head.rank, 0, f"rank {head.rank} ({head.host})")
    yield {**_meta("process_sort_index", head.rank, 0, ""), "args": {"sort_index": head.rank}}
    for call in records[records["kind"] == CALL]:
        yield from _call(call, head.rank, names, first)
    work = records[records["kind"] != CALL]
    for lane, kind in sorted(set(work[["lane", "kind"]].tolist()), key=lambda row: (row[0], ROWS[row[1]])):
        row = 1 + lane * len(ROWS) + ROWS[kind]
        yield _meta("thread_name", head.rank, row, f"lane {lane}: {KINDS[kind]}")
        yield {**_meta("thread_sort_index", head.rank, row, ""), "args": {"sort_index": row}}
        for begin, end, one in spans(work[(work["lane"] == lane) & (work["kind"] == kind)]):
            yield _work(begin - first, end - begin, one, (head.rank, row), names)


def _meta(name: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": value}}


def _call(call: Any, rank: int, names: list[str], first: int) -> Iterator[dict[str, Any]]:
    """Yield the beginning and the end of a call: several may overlap."""
    title = f"{names[call['name']]} (call {call['call']})"
    common = {"cat": "call", "name": title, "id": f"{rank}.{call['group']}.{call['call']}", "pid": rank, "tid": 0}
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
        args |= {"plain bytes": one["plain"], "ratio": round(one["plain"] / max(1, one["nbytes"]), 3)}
    pid, tid = row
    return {
        **{"ph": "X", "cat": KINDS[kind], "name": name, "pid": pid, "tid": tid},
        **{"ts": begin / 1e3, "dur": took / 1e3, "args": args},
    }
