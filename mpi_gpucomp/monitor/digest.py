"""What a rank tells of its last second: where its time went, by link, coder and processor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpi_gpucomp.monitor.box import CALL, RECV, SEND

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from mpi_gpucomp.monitor.recorder import Group

__all__ = ["LOOKED_AT_NS", "Digest", "Outgoing", "UnderWay", "digest", "united"]

LOOKED_AT_NS = 1_000_000_000
"""How far back a digest looks."""


class UnderWay(NamedTuple):
    """A chunk that is not complete."""

    kind: int
    peer: int
    """Rank of the communicator."""
    rail: int
    posted: int
    waited: int
    """Since when a lane cannot go on without it, or 0."""
    nbytes: int
    """Of one that is sent."""


class Outgoing(NamedTuple):
    """A link as its sender sees it."""

    peer: int
    rail: int
    speed: float
    """Bytes a second now."""
    mean: float
    """Bytes a second before, in calls of the same sort."""
    slow: bool
    busy: float
    """The share of the time in calls in which something was under way."""


@dataclass
class Digest:
    """The last second of a rank; ranks are those of the world, times are shares of the time spent in calls."""

    rank: int
    host: str = ""
    clock: int = 0
    begun: dict[str, int] = field(default_factory=dict)
    """How many calls of each name it has begun; those without a name together, and those of MPI's own."""
    waits: list[str] = field(default_factory=list)
    """What its caller waits for."""
    links: list[Outgoing] = field(default_factory=list)
    starved: dict[int, float] = field(default_factory=dict)
    """How long its lanes waited for messages of each rank."""
    late: dict[int, float] = field(default_factory=dict)
    """How long calls waited for each rank that was the last to join them, as a share of the whole second."""
    calls: int = 0
    outside: float = 0.0
    """The share of the whole second that it spent in no call."""
    coding: float = 1.0
    """How fast it encodes and decodes, against its own mean."""
    delayed: float = 0.0
    """The share of the second in which its worst thread waited for a processor."""
    pressed: bool = False
    """Whether threads of its machine wait for processors most of the time."""
    still: float = 0.0
    """The share of the second in which it stood still, without waiting for one."""


def united(spans: Sequence[tuple[int, int]] | npt.NDArray[Any], begin: int, end: int) -> int:
    """Return how long at least one of the spans (start and end) lasts between two times."""
    rows = np.asarray(spans, np.int64).reshape(-1, 2)
    if not len(rows):
        return 0
    rows = np.clip(rows[np.argsort(rows[:, 0])], begin, end)
    reached = np.maximum.accumulate(rows[:, 1])
    before = np.concatenate(([begin], reached[:-1]))
    return int(np.maximum(0, rows[:, 1] - np.maximum(rows[:, 0], before)).sum())


def _spans(records: npt.NDArray[Any], since: str, now: int) -> list[tuple[int, int]]:
    ends = np.where(records["complete"] == 0, now, records["complete"])
    return list(zip(records[since].tolist(), ends.tolist(), strict=True))


def digest(group: Group, now: int, under_way: Sequence[UnderWay] = ()) -> Digest:
    """Sum up the last second of a communicator, by its records and what is not complete yet."""
    begin = now - LOOKED_AT_NS
    records = group.recorder.box.records(begin)
    records = records[records["group"] == group.number]
    of = {kind: records[records["kind"] == kind] for kind in (SEND, RECV, CALL)}
    own = Digest(group.world[group.rank], clock=now, coding=group.tally.pace.share)
    own.calls = int((of[CALL]["complete"] > 0).sum())
    in_calls = united(_spans(of[CALL], "post", now), begin, now)
    own.outside = 1 - in_calls / LOOKED_AT_NS
    for (peer, rail), link in group.tally.links.items():
        sends = of[SEND][(of[SEND]["peer"] == peer) & (of[SEND]["rail"] == rail)]
        leaving = [
            (one.posted, now) for one in under_way if (one.kind, group.world[one.peer], one.rail) == (SEND, peer, rail)
        ]
        busy = united(_spans(sends, "post", now) + leaving, begin, now) / max(1, in_calls)
        quiet = bool(leaving) and link.is_quiet(now)
        speed, slow = (0.0, True) if quiet else (link.recent, link.is_slow(now))
        own.links.append(Outgoing(peer, rail, speed, link.before or link.mean, slow, busy))
    own.starved = {peer: time / max(1, in_calls) for peer, time in _starved(group, of[RECV], now, under_way).items()}
    own.late = _late(of[CALL], begin, now)
    return own


def _starved(group: Group, taken: npt.NDArray[Any], now: int, under_way: Sequence[UnderWay]) -> dict[int, int]:
    """Return how long lanes waited for messages of each rank."""
    waits: dict[int, list[tuple[int, int]]] = {}
    for peer, since, until in taken[taken["transmit"] > 0][["peer", "transmit", "complete"]].tolist():
        waits.setdefault(peer, []).append((since, until))
    for one in under_way:
        if one.kind == RECV and one.waited:
            waits.setdefault(group.world[one.peer], []).append((one.waited, now))
    return {peer: united(spans, now - LOOKED_AT_NS, now) for peer, spans in waits.items()}


def _late(calls: npt.NDArray[Any], begin: int, now: int) -> dict[int, float]:
    late: dict[int, float] = {}
    for call in calls[(calls["transmit"] > 0) & (calls["peer"] >= 0)]:
        waited = min(int(call["transmit"]), now) - max(int(call["post"]), begin)
        peer = int(call["peer"])
        late[peer] = late.get(peer, 0.0) + max(0, waited) / LOOKED_AT_NS
    return late
