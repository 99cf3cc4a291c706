"""Diagnosis: compares the summaries of all ranks for the same second, with one rule for each kind of anomaly.

A link is diagnosed only if both ends were ready all the time: its sender had chunks in flight and its receiver waited
for them. So a rank behind a slow one, which cannot forward, is never diagnosed, nor is the link to it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpi_gpucomp.trace import CALL, RECV, SEND

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from mpi_gpucomp.monitor.recorder import CommRecorder
    from mpi_gpucomp.trace import InFlight

    Summaries = Mapping[int, "RankSummary"]

__all__ = [
    *("ALARM_KINDS", "HANG", "IMBALANCE", "LATE", "SLOW_LINK", "SLOW_RANK", "STALL", "SUMMARY_NS"),
    *("Diagnosis", "LinkSummary", "RankSummary", "diagnose", "diagnose_hang", "diagnose_silence"),
    *("summarize", "united"),
]

ALARM_KINDS = SLOW_LINK, SLOW_RANK, STALL, HANG, IMBALANCE = "slow link", "slow rank", "stall", "hang", "imbalance"
SUMMARY_NS = 1_000_000_000
"""The time that a summary covers."""
BUSY, RECV_WAIT = 0.6, 0.5
"""Shares of the time in calls for which a sender must be busy with a slow link, and its receiver must wait for it."""
OFF, OFF_MORE = 0.3, 2.0
"""A rank that does not run for this share of the time, and for this many times that of the others, is slow."""
LEFT = 4.0
"""A rank is also slow if it gets at most 1/LEFT of the CPU time that other hosts get, where all are busy."""
DELAYED = 0.25
"""The share of the time waiting for a processor from which on a rank is short of CPU time."""
APART = 0.6
"""A slow link has at most this share of the other links' bandwidth, each relative to its own mean."""
CODEC_SLOW = 0.5
LATE = 0.25
"""The share of a second that others spend waiting for a rank to join, from which on it is out of balance."""
OUTSIDE = 0.5
"""The share of a second outside of calls from which on a rank is not taken to be waiting."""
MIN_CALLS = 2
"""Calls in that second: one late call is not an imbalance."""
TIMES, TIMES_BUSY, TIMES_NO_CPU, TIMES_BUSY_HOSTS, TIMES_SILENT = 2, 6, 4, 10, 3
"""How often a diagnosis must be made: usually; of a link with an end, or of a late rank, that is short of CPU
time; of a rank that is short of CPU time while other hosts are not, and while they are; and of a silent rank. A busy
machine may not run a thread for a second."""


class Diagnosis(NamedTuple):
    """An anomaly, the ranks that cause it, and a sentence."""

    kind: str
    ranks: tuple[int, ...]
    """The rank; of a link, its two ends."""
    text: str
    times: int = TIMES
    """How often it must be made to be believed, more often than not: one second may be unlike all others."""
    evidence: int = 0
    """A number that changes with new evidence; the same evidence counts once. 0 if every diagnosis counts."""

    def to_json(self) -> str:
        """Return it as text, for other ranks."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Diagnosis:
        """Parse the text of another rank; raise ValueError if it is malformed."""
        try:
            kind, ranks, sentence, times, evidence = json.loads(text)
            made = cls(str(kind), tuple(map(int, ranks)), str(sentence), int(times), int(evidence))
        except (TypeError, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from error
        if made.kind not in ALARM_KINDS:
            raise ValueError(f"unknown kind of alarm {made.kind!r}")
        return made


class LinkSummary(NamedTuple):
    """A link as its sender sees it."""

    peer: int
    rail: int
    bandwidth: float
    """Bytes per second now; 0 if it is stuck."""
    mean: float
    """Bytes per second before, in calls of the same class."""
    slow: bool
    busy: float
    """The share of the time in calls in which chunks were in flight."""

    @property
    def share(self) -> float:
        """Return the bandwidth as a share of the mean, at most 1."""
        return min(1.0, self.bandwidth / self.mean) if self.mean else 1.0

    @property
    def text(self) -> str:
        """Return the bandwidth, and the mean before."""
        return f"{self.bandwidth / 1e6:.0f} MB/s instead of {self.mean / 1e6:.0f} MB/s"


@dataclass
class RankSummary:
    """The last second of a rank; ranks are those of the world, shares are of the time in calls unless noted."""

    rank: int
    host: str = ""
    clock: int = 0
    records: int = 0
    """Trace records of the communicator so far."""
    begun: dict[str, int] = field(default_factory=dict)
    """Calls begun, by name; unnamed calls are counted together, and so are native MPI calls."""
    waits: list[str] = field(default_factory=list)
    """The calls that its caller is blocked in."""
    links: list[LinkSummary] = field(default_factory=list)
    recv_wait: dict[int, float] = field(default_factory=dict)
    """How long its lanes were blocked on messages of each rank."""
    late: dict[int, float] = field(default_factory=dict)
    """How long calls waited for each rank that joined last, as a share of the whole second."""
    calls: int = 0
    """Completed calls."""
    outside: float = 0.0
    """The share of the whole second outside of calls."""
    codec: float = 1.0
    """The codec's rate as a share of its mean."""
    delayed: float = 0.0
    """The share of the whole second in which its most delayed thread waited for a processor."""
    cpu_pressure: bool = False
    """Whether threads of its machine wait for processors most of the time."""
    stalled: float = 0.0
    """The share of the whole second in which it did not run, without waiting for a processor."""

    @property
    def name(self) -> str:
        """Return the rank and its host."""
        return f"rank {self.rank} ({self.host})" if self.host else f"rank {self.rank}"

    @property
    def is_short_of_cpu(self) -> bool:
        """Return True if its threads wait for a processor for so long that its rates show that, not the wire."""
        return self.delayed > DELAYED

    def to_json(self) -> str:
        """Return it as text, for other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankSummary:
        """Parse the text of another rank; raise ValueError if it is malformed."""
        try:
            made = cls(**json.loads(text))
            return cls(
                rank=int(made.rank),
                host=str(made.host),
                clock=int(made.clock),
                records=int(made.records),
                begun={str(name): int(count) for name, count in made.begun.items()},
                waits=list(map(str, made.waits)),
                links=[_link(*link) for link in made.links],
                recv_wait=_shares(made.recv_wait),
                late=_shares(made.late),
                calls=int(made.calls),
                outside=_number(made.outside),
                codec=_number(made.codec),
                delayed=_number(made.delayed),
                cpu_pressure=bool(made.cpu_pressure),
                stalled=_number(made.stalled),
            )
        except (TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from error


def _link(peer: int, rail: int, bandwidth: float, mean: float, slow: bool, busy: float) -> LinkSummary:
    return LinkSummary(int(peer), int(rail), _number(bandwidth), _number(mean), bool(slow), _number(busy))


def _shares(found: Mapping[Any, Any]) -> dict[int, float]:
    return {int(rank): _number(share) for rank, share in found.items()}


def _number(value: Any) -> float:
    number = float(value)
    if not isfinite(number):
        raise ValueError(f"no finite number: {value!r}")
    return number


def summarize(trace: CommRecorder, now: int, in_flight: Sequence[InFlight] = ()) -> RankSummary:
    """Summarize the last second of a communicator, from its records and the transfers in flight."""
    begin = now - SUMMARY_NS
    records = trace.recorder.buffer.records(begin)
    records = records[records["comm"] == trace.number]
    of = {kind: records[records["kind"] == kind] for kind in (SEND, RECV, CALL)}
    counters = trace.counters
    own = RankSummary(trace.world[trace.rank], clock=now, records=counters.records, codec=counters.codec.share)
    own.calls = int((of[CALL]["complete"] > 0).sum())
    in_calls = united(_spans(of[CALL], "post", now), begin, now)
    own.outside = 1 - in_calls / SUMMARY_NS
    for (peer, rail), link in counters.links.items():
        sends = of[SEND][(of[SEND]["peer"] == peer) & (of[SEND]["rail"] == rail)]
        leaving = [
            (one.posted, now) for one in in_flight if (one.kind, trace.world[one.peer], one.rail) == (SEND, peer, rail)
        ]
        busy = united(_spans(sends, "post", now) + leaving, begin, now) / max(1, in_calls)
        stuck = bool(leaving) and link.is_stuck(now)
        bandwidth, slow = (0.0, True) if stuck else (link.recent, link.is_slow(now))
        own.links.append(LinkSummary(peer, rail, bandwidth, link.before or link.mean, slow, busy))
    own.recv_wait = {peer: time / max(1, in_calls) for peer, time in _recv_wait(trace, of[RECV], now, in_flight)}
    own.late = _late(of[CALL], begin, now)
    return own


def united(spans: Sequence[tuple[int, int]] | npt.NDArray[Any], begin: int, end: int) -> int:
    """Return the length of the union of spans (start and end) between two times."""
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


def _recv_wait(
    trace: CommRecorder, received: npt.NDArray[Any], now: int, in_flight: Sequence[InFlight]
) -> list[tuple[int, int]]:
    """Return for how long lanes were blocked on messages of each rank."""
    waits: dict[int, list[tuple[int, int]]] = {}
    for peer, since, until in received[received["transmit"] > 0][["peer", "transmit", "complete"]].tolist():
        waits.setdefault(peer, []).append((since, until))
    for one in in_flight:
        if one.kind == RECV and one.waited:
            waits.setdefault(trace.world[one.peer], []).append((one.waited, now))
    return [(peer, united(spans, now - SUMMARY_NS, now)) for peer, spans in waits.items()]


def _late(calls: npt.NDArray[Any], begin: int, now: int) -> dict[int, float]:
    late: dict[int, float] = {}
    for call in calls[(calls["transmit"] > 0) & (calls["peer"] >= 0)]:
        waited = min(int(call["transmit"]), now) - max(int(call["post"]), begin)
        peer = int(call["peer"])
        late[peer] = late.get(peer, 0.0) + max(0, waited) / SUMMARY_NS
    return late


def diagnose(summaries: Summaries) -> Diagnosis | None:
    """Return the rank or link that makes all others slow, if there is one."""
    rules = _stalled, _no_processor, _slow_links, _slow_codec, _imbalance
    return next((found for rule in rules if (found := rule(summaries)) is not None), None)


def diagnose_silence(summaries: Summaries, ranks: tuple[int, ...], seconds: float) -> Diagnosis | None:
    """Diagnose the only rank that has not answered, if the others are in calls."""
    silent = [rank for rank in ranks if rank not in summaries]
    if len(silent) != 1 or median(summary.outside for summary in summaries.values()) > OUTSIDE:
        return None
    why = f"has not answered within {seconds:.0f} s, by any of its threads"
    return Diagnosis(SLOW_RANK, (silent[0],), f"slow rank: rank {silent[0]} {why}", TIMES_SILENT)


def _stalled(summaries: Summaries) -> Diagnosis | None:
    """Find a rank that is stopped again and again, while the others are not."""
    worst = max(summaries.values(), key=lambda summary: summary.stalled)
    others = median([summary.stalled for summary in summaries.values() if summary is not worst] or [0.0])
    if worst.stalled < OFF or worst.stalled < OFF_MORE * others:
        return None
    text = f"slow rank: {worst.name} is stalled {worst.stalled:.0%} of the time (others {others:.0%})"
    return Diagnosis(SLOW_RANK, (worst.rank,), text)


def _no_processor(summaries: Summaries) -> Diagnosis | None:
    """Find a rank on a busy host while other hosts are not busy; ranks of one host are not told apart."""
    hosts: dict[str, list[float]] = {}
    for summary in summaries.values():
        hosts.setdefault(summary.host, []).append(summary.delayed)
    delayed = {host: median(shares) for host, shares in hosts.items()}
    host, share = max(delayed.items(), key=lambda item: item[1])
    others = [other for name, other in delayed.items() if name != host]
    if not others or share < OFF or not _is_far_above(share, median(others)):
        return None
    ranks = (summary for summary in summaries.values() if summary.host == host)
    worst = max(ranks, key=lambda summary: summary.delayed)
    why = f"waits for a processor {worst.delayed:.0%} of the time (other hosts {median(others):.0%})"
    times = TIMES_BUSY_HOSTS if median(others) > DELAYED else TIMES_NO_CPU
    return Diagnosis(SLOW_RANK, (worst.rank,), f"slow rank: {worst.name} {why}", times)


def _is_far_above(share: float, others: float) -> bool:
    """Return True if a share of the time is far above that of others, or leaves far less to run."""
    return share >= OFF_MORE * others or LEFT * (1 - share) <= 1 - others


def _slow_links(summaries: Summaries) -> Diagnosis | None:
    """Find links that are slow though both ends are ready; if all slow links are at one rank, it is that rank."""
    slow = [
        (sender, link) for sender in summaries.values() for link in sender.links if _is_slow(link, sender, summaries)
    ]
    if not slow:
        return None
    at = Counter(rank for sender, link in slow for rank in {sender.rank, link.peer})
    rank, count = max(at.items(), key=lambda item: (item[1], -item[0]))
    if count > 1 and count == len(slow) and list(at.values()).count(count) == 1:
        links = " and ".join(f"{sender.rank} to {link.peer} at {link.text}" for sender, link in slow)
        text = f"slow rank: all links at {summaries[rank].name} are slow: {links}"
        return Diagnosis(SLOW_RANK, (rank,), text, _times(summaries, at), _evidence(summaries, at))
    sender, link = min(slow, key=lambda item: item[1].share)
    ends = sender.rank, link.peer
    rail = f", rail {link.rail}" if link.rail else ""
    text = f"slow link: from {sender.name} to {summaries[link.peer].name}{rail}, {link.text}"
    return Diagnosis(SLOW_LINK, ends, text, _times(summaries, ends), sender.records)


def _is_slow(link: LinkSummary, sender: RankSummary, summaries: Summaries) -> bool:
    """Return True if a link is slow though both ends are ready, and more so than the other links.

    Where an end is short of CPU time, its link may complete nothing for a while, and an only link has nothing to be
    compared with: neither is evidence of a slow wire then.
    """
    receiver = summaries.get(link.peer)
    if receiver is None or not link.slow or link.busy < BUSY or receiver.recv_wait.get(sender.rank, 0.0) < RECV_WAIT:
        return False
    short_of_cpu = sender.is_short_of_cpu or receiver.is_short_of_cpu
    others = [other.share for summary in summaries.values() for other in summary.links if other is not link]
    if short_of_cpu and (not others or not link.bandwidth):
        return False
    return not others or link.share < APART * median(others)


def _times(summaries: Summaries, ranks: Sequence[int] | Counter[int]) -> int:
    """Return how often slow links at these ranks must be diagnosed."""
    return TIMES_BUSY if any(summaries[rank].is_short_of_cpu for rank in ranks) else TIMES


def _evidence(summaries: Summaries, ranks: Sequence[int] | Counter[int]) -> int:
    return sum(summaries[rank].records for rank in ranks)


def _slow_codec(summaries: Summaries) -> Diagnosis | None:
    worst = min(summaries.values(), key=lambda summary: summary.codec)
    others = [summary.codec for summary in summaries.values() if summary is not worst]
    if worst.codec >= CODEC_SLOW or worst.is_short_of_cpu or (others and median(others) < CODEC_SLOW):
        return None
    if worst.cpu_pressure:  # the codec's threads may wait for a processor while the polling one does not
        return None
    text = f"slow rank: {worst.name} encodes and decodes at {worst.codec:.0%} of its usual rate"
    return Diagnosis(SLOW_RANK, (worst.rank,), text, evidence=worst.records)


def _imbalance(summaries: Summaries) -> Diagnosis | None:
    """Find a rank that others wait for at the start of calls, because it is outside of calls for longer than they."""
    late: dict[int, float] = {}
    for summary in summaries.values():
        for rank, share in summary.late.items():
            late[rank] = max(late.get(rank, 0.0), share)
    if not late:
        return None
    rank, share = max(late.items(), key=lambda item: item[1])
    behind = summaries.get(rank)
    if behind is None or share < LATE or behind.calls < MIN_CALLS:
        return None
    others = median(summary.outside for summary in summaries.values() if summary is not behind)
    if behind.outside - others < share / 2:
        return None
    where = f"it is outside of calls {behind.outside:.0%} of the time, the others {others:.0%}"
    text = f"imbalance: {behind.name} joins calls late, others wait for it {share:.0%} of the time; {where}"
    times = TIMES_BUSY if behind.is_short_of_cpu else TIMES
    return Diagnosis(IMBALANCE, (rank,), text, times, behind.records)


def diagnose_hang(summaries: Summaries, ranks: tuple[int, ...], seconds: float) -> Diagnosis:
    """Return the ranks behind calls without progress, by how many calls each rank has begun."""
    silent = [rank for rank in ranks if rank not in summaries]
    waiting = f"no progress for {seconds:.0f} s"
    if silent:
        who = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
        verb = "do" if len(silent) > 1 else "does"
        return Diagnosis(HANG, tuple(silent), f"hang: {who} {verb} not answer, {waiting}")
    for name in dict.fromkeys(name for summary in summaries.values() for name in summary.begun):
        counts = {rank: summary.begun.get(name, 0) for rank, summary in summaries.items()}
        most = max(counts.values())
        behind = [rank for rank, count in counts.items() if count < most]
        if behind and any(summary.waits for rank, summary in summaries.items() if counts[rank] == most):
            return _not_joined(summaries, behind, name, counts, waiting)
    titles = sorted({title for summary in summaries.values() for title in summary.waits})
    where = f" in {', '.join(titles)}" if titles else ""
    return Diagnosis(HANG, (), f"hang: all ranks have joined the same calls, {waiting}{where}")


def _not_joined(
    summaries: Summaries, behind: list[int], name: str, counts: Mapping[int, int], waiting: str
) -> Diagnosis:
    most = max(counts.values())
    titles = (title for rank, summary in summaries.items() if counts[rank] == most for title in summary.waits)
    title = next(titles, "a call")
    calls = f"calls {name!r}" if name else "calls"
    each = " and ".join(f"{summaries[rank].name} has begun {counts[rank]}" for rank in behind)
    return Diagnosis(HANG, tuple(behind), f"hang: {each} of {most} {calls}, others wait in {title}, {waiting}")
