"""Who is to blame, by what all ranks tell of the same second: one rule for each kind of trouble, in this order.

A link is only blamed if both ends were ready all the time: its sender had bytes under way and its receiver waited for
them. So a rank behind a slow one, which cannot pass on what it gets, is never blamed, nor is the link to it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpi_gpucomp.trace import CALL, RECV, SEND

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from mpi_gpucomp.monitor.recorder import CommRecorder
    from mpi_gpucomp.trace import InFlight

__all__ = [
    "ALARM_KINDS",
    "HANG",
    "IMBALANCE",
    "LOOKED_AT_NS",
    "SLOW_LINK",
    "SLOW_RANK",
    "STALL",
    "Diagnosis",
    "Outgoing",
    "RankSummary",
    "diagnose",
    "diagnose_hang",
    "diagnose_silence",
    "summarize",
    "united",
]

ALARM_KINDS = SLOW_LINK, SLOW_RANK, STALL, HANG, IMBALANCE = "slow link", "slow rank", "stall", "hang", "imbalance"
BUSY, STARVED = 0.6, 0.5
"""Shares of the time in calls from which on a sender is busy with a link, and a receiver waits for it."""
OFF, OFF_MORE = 0.3, 2.0
"""A rank that does not run for this share of the time, and so many times that of the others, is slow."""
STARVED_TIMES, SILENT_TIMES = 4, 3
"""How often a rank must be short of a processor, or silent: a busy machine may forget a thread for a second."""
LEFT = 4.0
"""So many times less of the time left to run: where the others do not get much either, no share is twice theirs."""
DELAYED = 0.25
"""The share of the time without a processor from which on a coder, or an only link, is not blamed for being slow."""
APART = 0.6
"""How far a link must be below the others, each measured by its own mean."""
CODES_SLOWLY = 0.5
LATE = 0.25
"""The share of a second that others spend waiting for a rank to join, from which on it is out of balance."""
ELSEWHERE = 0.5
"""The share of a second outside of calls from which on nobody can be said to wait."""
LEAST_CALLS = 2
"""Calls in that second: one that comes late once is not out of balance."""


class Diagnosis(NamedTuple):
    """What is wrong, with whom, in a sentence."""

    kind: str
    ranks: tuple[int, ...]
    """The rank; of a link, from and to."""
    text: str
    times: int = 2
    """How often it must be said to be believed, more often than not: one second may be unlike all others."""

    def to_json(self) -> str:
        """Return it as text, for other ranks."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Diagnosis:
        """Read what `to_json` returned on another rank; raise ValueError for anything else."""
        try:
            kind, ranks, what, times = json.loads(text)
            made = cls(str(kind), tuple(map(int, ranks)), str(what), int(times))
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error
        if made.kind not in ALARM_KINDS:
            raise ValueError(f"no kind of alarm: {made.kind!r}")
        return made


def diagnose(told: Mapping[int, RankSummary]) -> Diagnosis | None:
    """Say who makes all the others slow, if anybody does."""
    rules = _stands_still, _no_processor, _slow_links, _codes_slowly, _imbalance
    return next((verdict for rule in rules if (verdict := rule(told)) is not None), None)


def diagnose_silence(told: Mapping[int, RankSummary], ranks: tuple[int, ...], seconds: float) -> Diagnosis | None:
    """Say who makes the others slow, where these are in calls and one alone does not find the time to answer."""
    silent = [rank for rank in ranks if rank not in told]
    if len(silent) != 1 or median(summary.outside for summary in told.values()) > ELSEWHERE:
        return None
    why = f"does not come to answer within {seconds:.0f} s, by any of its threads"
    return Diagnosis(SLOW_RANK, (silent[0],), f"slow rank: rank {silent[0]} {why}", SILENT_TIMES)


def _named(summary: RankSummary) -> str:
    return f"rank {summary.rank} ({summary.host})" if summary.host else f"rank {summary.rank}"


def _stands_still(told: Mapping[int, RankSummary]) -> Diagnosis | None:
    """Find a rank that is stopped again and again, while the others are not."""
    worst = max(told.values(), key=lambda summary: summary.still)
    others = median([summary.still for summary in told.values() if summary is not worst] or [0.0])
    if worst.still < OFF or worst.still < OFF_MORE * others:
        return None
    said = f"slow rank: {_named(worst)} stands still {worst.still:.0%} of the time (others {others:.0%})"
    return Diagnosis(SLOW_RANK, (worst.rank,), said)


def _no_processor(told: Mapping[int, RankSummary]) -> Diagnosis | None:
    """Find a rank on a busy host, while other hosts are not busy; ranks of one host share what there is."""
    hosts: dict[str, list[float]] = {}
    for summary in told.values():
        hosts.setdefault(summary.host, []).append(summary.delayed)
    busy = {host: median(shares) for host, shares in hosts.items()}
    host, share = max(busy.items(), key=lambda item: item[1])
    others = [other for name, other in busy.items() if name != host]
    if not others or share < OFF or not _is_far_above(share, median(others)):
        return None
    worst = max((summary for summary in told.values() if summary.host == host), key=lambda summary: summary.delayed)
    why = f"waits for a processor {worst.delayed:.0%} of the time (other hosts {median(others):.0%})"
    return Diagnosis(SLOW_RANK, (worst.rank,), f"slow rank: {_named(worst)} {why}", STARVED_TIMES)


def _is_far_above(share: float, others: float) -> bool:
    """Say whether a share of the time is far above that of others, or leaves far less."""
    return share >= OFF_MORE * others or LEFT * (1 - share) <= 1 - others


def _is_to_blame(link: Outgoing, told: Mapping[int, RankSummary], sender: int) -> bool:
    """Say whether a link is slow though both ends are ready, and more so than the others."""
    receiver = told.get(link.peer)
    if receiver is None or not link.slow or link.busy < BUSY or receiver.starved.get(sender, 0.0) < STARVED:
        return False
    others = [_share(other) for one in told.values() for other in one.links if other is not link and not other.slow]
    if others:
        return _share(link) < APART * median(others)
    return max(receiver.delayed, told[sender].delayed) <= DELAYED


def _share(link: Outgoing) -> float:
    return link.speed / link.mean if link.mean else 1.0


def _slow_links(told: Mapping[int, RankSummary]) -> Diagnosis | None:
    """Find links that are slow though both ends are ready; two or more at one rank are that rank's."""
    slow = [(one.rank, link) for one in told.values() for link in one.links if _is_to_blame(link, told, one.rank)]
    if not slow:
        return None
    ends = Counter(rank for sender, link in slow for rank in {sender, link.peer})
    rank, count = max(ends.items(), key=lambda item: (item[1], -item[0]))
    if count > 1 and count == len(slow) and list(ends.values()).count(count) == 1:
        what = " and ".join(f"{sender} to {link.peer} at {_speed(link)}" for sender, link in slow)
        return Diagnosis(SLOW_RANK, (rank,), f"slow rank: all links at {_named(told[rank])} are slow: {what}")
    sender, link = min(slow, key=lambda item: item[1].speed / max(1.0, item[1].mean))
    way = f"from {_named(told[sender])} to {_named(told[link.peer])}"
    rail = f", rail {link.rail}" if link.rail else ""
    return Diagnosis(SLOW_LINK, (sender, link.peer), f"slow link: {way}{rail}, {_speed(link)}")


def _speed(link: Outgoing) -> str:
    return f"{link.speed / 1e6:.0f} MB/s instead of {link.mean / 1e6:.0f} MB/s"


def _codes_slowly(told: Mapping[int, RankSummary]) -> Diagnosis | None:
    worst = min(told.values(), key=lambda summary: summary.coding)
    others = [summary.coding for summary in told.values() if summary is not worst]
    if worst.coding >= CODES_SLOWLY or worst.delayed > DELAYED or (others and median(others) < CODES_SLOWLY):
        return None
    if worst.pressed:  # those that code may wait for a processor, while the one that asks does not
        return None
    said = f"slow rank: {_named(worst)} encodes and decodes at {worst.coding:.0%} of its usual speed"
    return Diagnosis(SLOW_RANK, (worst.rank,), said)


def _imbalance(told: Mapping[int, RankSummary]) -> Diagnosis | None:
    """Find a rank that others wait for at the beginning of calls, because it is elsewhere for longer than they."""
    late: dict[int, float] = {}
    for one in told.values():
        for rank, share in one.late.items():
            late[rank] = max(late.get(rank, 0.0), share)
    if not late:
        return None
    rank, share = max(late.items(), key=lambda item: item[1])
    behind = told.get(rank)
    if behind is None or share < LATE or behind.calls < LEAST_CALLS:
        return None
    others = median(summary.outside for summary in told.values() if summary is not behind)
    if behind.outside - others < share / 2:
        return None
    where = f"it is outside of calls {behind.outside:.0%} of the time, the others {others:.0%}"
    said = f"imbalance: {_named(behind)} comes late to calls, others wait for it {share:.0%} of the time; {where}"
    return Diagnosis(IMBALANCE, (rank,), said)


def diagnose_hang(told: Mapping[int, RankSummary], ranks: tuple[int, ...], seconds: float) -> Diagnosis:
    """Say who is behind calls in which nothing moves, by how far each rank has come."""
    silent = [rank for rank in ranks if rank not in told]
    waiting = f"nothing has moved for {seconds:.0f} s"
    if silent:
        who = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
        verb = "do" if len(silent) > 1 else "does"
        return Diagnosis(HANG, tuple(silent), f"hang: {who} {verb} not answer, and {waiting}")
    for name in dict.fromkeys(name for summary in told.values() for name in summary.begun):
        counts = {rank: summary.begun.get(name, 0) for rank, summary in told.items()}
        most = max(counts.values())
        behind = [rank for rank, count in counts.items() if count < most]
        if behind and any(summary.waits for rank, summary in told.items() if counts[rank] == most):
            return _not_joined(told, behind, name, counts, most, waiting)
    titles = sorted({title for summary in told.values() for title in summary.waits})
    what = f" in {', '.join(titles)}" if titles else ""
    return Diagnosis(HANG, (), f"hang: all ranks have joined the same calls, and {waiting}{what}")


def _not_joined(
    told: Mapping[int, RankSummary], behind: list[int], name: str, counts: Mapping[int, int], most: int, waiting: str
) -> Diagnosis:
    title = next((title for rank, summary in told.items() if counts[rank] == most for title in summary.waits), "a call")
    calls = f"calls {name!r}" if name else "calls"
    each = " and ".join(f"{_named(told[rank])} has begun {counts[rank]}" for rank in behind)
    return Diagnosis(HANG, tuple(behind), f"hang: {each} of {most} {calls}, others wait in {title}, and {waiting}")


# What a rank tells of its last second: where its time went, by link, coder and processor.

LOOKED_AT_NS = 1_000_000_000
"""How far back a summary looks."""


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
class RankSummary:
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

    def to_json(self) -> str:
        """Return it as text, for other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankSummary:
        """Read what `to_json` returned on another rank; raise ValueError for anything else."""
        try:
            made = cls(**json.loads(text))
            return cls(
                rank=int(made.rank),
                host=str(made.host),
                clock=int(made.clock),
                begun={str(name): int(count) for name, count in made.begun.items()},
                waits=list(map(str, made.waits)),
                links=[_link(*link) for link in made.links],
                starved=_shares(made.starved),
                late=_shares(made.late),
                calls=int(made.calls),
                outside=float(made.outside),
                coding=float(made.coding),
                delayed=float(made.delayed),
                pressed=bool(made.pressed),
                still=float(made.still),
            )
        except (TypeError, AttributeError, RecursionError) as error:
            raise ValueError(str(error)) from error


def _link(peer: int, rail: int, speed: float, mean: float, slow: bool, busy: float) -> Outgoing:
    return Outgoing(int(peer), int(rail), float(speed), float(mean), bool(slow), float(busy))


def _shares(found: Mapping[Any, Any]) -> dict[int, float]:
    return {int(rank): float(share) for rank, share in found.items()}


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


def summarize(group: CommRecorder, now: int, under_way: Sequence[InFlight] = ()) -> RankSummary:
    """Sum up the last second of a communicator, by its records and what is not complete yet."""
    begin = now - LOOKED_AT_NS
    records = group.recorder.box.records(begin)
    records = records[records["group"] == group.number]
    of = {kind: records[records["kind"] == kind] for kind in (SEND, RECV, CALL)}
    own = RankSummary(group.world[group.rank], clock=now, coding=group.tally.pace.share)
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


def _starved(group: CommRecorder, taken: npt.NDArray[Any], now: int, under_way: Sequence[InFlight]) -> dict[int, int]:
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
