"""What the page shows: bytes between ranks, where each rank's time went, and spans for the timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpi_gpucomp.monitor.chrome_trace import spans
from mpi_gpucomp.monitor.diagnosis import united
from mpi_gpucomp.monitor.reader import aligned
from mpi_gpucomp.trace import CALL, DECODE, ENCODE, KINDS, RECV, SEND

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from mpi_gpucomp.monitor.trace_buffer import TraceBuffer

__all__ = ["MOST", "Shares", "for_script", "shares", "size_text", "speed_text"]

MOST = 4000
"""Records of a rank that the timeline shows, the newest ones."""
LEAST_SHOWN_US = 1000.0


def size_text(nbytes: float) -> str:
    """Write a number of bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def speed_text(speed: float) -> str:
    """Write bytes a second."""
    return f"{speed / 1e9:.2f} GB/s" if speed >= 1e9 else f"{speed / 1e6:.0f} MB/s"


class Shares(NamedTuple):
    """Where a rank's time went while records were kept, as shares of it; they overlap, as the work does."""

    seconds: float
    encode: float
    send: float
    receive: float
    decode: float
    outside: float
    """In no call."""


def shares(records: npt.NDArray[Any]) -> Shares:
    """Sum up the records of a rank: how long it encoded, sent, waited for messages, and decoded."""
    done = records[records["complete"] > 0]
    if not len(done):
        return Shares(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    begin, end = int(done["post"].min()), int(done["complete"].max())
    whole = max(1, end - begin)

    def share(kind: int, since: str = "post") -> float:
        some = done[(done["kind"] == kind) & (done[since] > 0)]
        return united(np.stack((some[since], some["complete"]), axis=1), begin, end) / whole

    return Shares(
        whole / 1e9, share(ENCODE), share(SEND), share(RECV, "transmit"), share(DECODE), max(0.0, 1 - share(CALL))
    )


def for_script(boxes: Sequence[TraceBuffer]) -> dict[str, Any]:
    """Return the newest spans of all ranks, in microseconds from the first of them, for the timeline."""
    records = [some[some["complete"] > 0][-MOST:] for some in aligned(boxes)]
    filled = [some for some in records if len(some)]
    if not filled:
        return {"ranks": [], "calls": [], "end": 1.0, "shown": 1.0}
    first = max(int(some["post"].min()) for some in filled)  # from when on every rank's records are there
    end = max(int(some["complete"].max()) for some in filled)
    first = first if first < end else min(int(some["post"].min()) for some in filled)
    titles: dict[str, int] = {}
    ranks = [
        {
            "name": f"rank {box.head.rank} ({box.head.host})",
            "rows": _rows(box, some[some["complete"] >= first], first, titles),
        }
        for box, some in zip(boxes, records, strict=True)
    ]
    lengths = [int(one) for some in filled for one in (some["complete"] - some["post"])[some["kind"] == CALL]]
    shown = max(LEAST_SHOWN_US, 3 * float(np.median(lengths)) / 1e3 if lengths else 0.0)
    whole = max(1.0, (end - first) / 1e3)
    return {"ranks": ranks, "calls": list(titles), "end": whole, "shown": min(shown, whole)}


def _rows(box: TraceBuffer, records: npt.NDArray[Any], first: int, titles: dict[str, int]) -> list[dict[str, Any]]:
    names, rows = box.names, []
    for kind in (CALL, ENCODE, SEND, RECV, DECODE):
        some = records[records["kind"] == kind]
        if len(some) or kind == CALL:
            found = []
            for lane in sorted(set(some["lane"].tolist())):
                for begin, end, one in spans(some[some["lane"] == lane]):
                    title = titles.setdefault(f"{names[one['name']]} (call {one['call']})", len(titles))
                    begin = max(one["post"] if kind == CALL else begin, first)
                    nbytes = one["plain"] if kind in (ENCODE, DECODE) else one["nbytes"]
                    found.append(
                        [round((begin - first) / 1e3, 1), round((end - begin) / 1e3, 1), one["peer"], nbytes, title]
                    )
            rows.append({"kind": KINDS[kind], "spans": sorted(found)})
    return rows
