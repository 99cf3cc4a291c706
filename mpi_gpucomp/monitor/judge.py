"""Who is to blame, by what all ranks tell of the same second: one rule for each kind of trouble, in this order.

A link is only blamed if both ends were ready all the time: its sender had bytes under way and its receiver waited for
them. So a rank behind a slow one, which cannot pass on what it gets, is never blamed, nor is the link to it.
"""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpi_gpucomp.monitor.digest import Digest, Outgoing

__all__ = [
    "ALARM_KINDS",
    "HANG",
    "IMBALANCE",
    "SLOW_LINK",
    "SLOW_RANK",
    "STALL",
    "Verdict",
    "judge",
    "judge_hang",
    "judge_silence",
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


class Verdict(NamedTuple):
    """What is wrong, with whom, in a sentence."""

    kind: str
    ranks: tuple[int, ...]
    """The rank; of a link, from and to."""
    text: str
    times: int = 2
    """How often it must be said to be believed, more often than not: one second may be unlike all others."""


def judge(told: Mapping[int, Digest]) -> Verdict | None:
    """Say who makes all the others slow, if anybody does."""
    rules = _stands_still, _no_processor, _slow_links, _codes_slowly, _imbalance
    return next((verdict for rule in rules if (verdict := rule(told)) is not None), None)


def judge_silence(told: Mapping[int, Digest], ranks: tuple[int, ...], seconds: float) -> Verdict | None:
    """Say who makes the others slow, where these are in calls and one alone does not find the time to answer."""
    silent = [rank for rank in ranks if rank not in told]
    if len(silent) != 1 or median(digest.outside for digest in told.values()) > ELSEWHERE:
        return None
    why = f"does not come to answer within {seconds:.0f} s, by any of its threads"
    return Verdict(SLOW_RANK, (silent[0],), f"slow rank: rank {silent[0]} {why}", SILENT_TIMES)


def _named(digest: Digest) -> str:
    return f"rank {digest.rank} ({digest.host})" if digest.host else f"rank {digest.rank}"


def _stands_still(told: Mapping[int, Digest]) -> Verdict | None:
    """Find a rank that is stopped again and again, while the others are not."""
    worst = max(told.values(), key=lambda digest: digest.still)
    others = median([digest.still for digest in told.values() if digest is not worst] or [0.0])
    if worst.still < OFF or worst.still < OFF_MORE * others:
        return None
    said = f"slow rank: {_named(worst)} stands still {worst.still:.0%} of the time (others {others:.0%})"
    return Verdict(SLOW_RANK, (worst.rank,), said)


def _no_processor(told: Mapping[int, Digest]) -> Verdict | None:
    """Find a rank on a busy host, while other hosts are not busy; ranks of one host share what there is."""
    hosts: dict[str, list[float]] = {}
    for digest in told.values():
        hosts.setdefault(digest.host, []).append(digest.delayed)
    busy = {host: median(shares) for host, shares in hosts.items()}
    host, share = max(busy.items(), key=lambda item: item[1])
    others = [other for name, other in busy.items() if name != host]
    if not others or share < OFF or not _is_far_above(share, median(others)):
        return None
    worst = max((digest for digest in told.values() if digest.host == host), key=lambda digest: digest.delayed)
    why = f"waits for a processor {worst.delayed:.0%} of the time (other hosts {median(others):.0%})"
    return Verdict(SLOW_RANK, (worst.rank,), f"slow rank: {_named(worst)} {why}", STARVED_TIMES)


def _is_far_above(share: float, others: float) -> bool:
    """Say whether a share of the time is far above that of others, or leaves far less."""
    return share >= OFF_MORE * others or LEFT * (1 - share) <= 1 - others


def _is_to_blame(link: Outgoing, told: Mapping[int, Digest], sender: int) -> bool:
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


def _slow_links(told: Mapping[int, Digest]) -> Verdict | None:
    """Find links that are slow though both ends are ready; two or more at one rank are that rank's."""
    slow = [(one.rank, link) for one in told.values() for link in one.links if _is_to_blame(link, told, one.rank)]
    if not slow:
        return None
    ends = Counter(rank for sender, link in slow for rank in {sender, link.peer})
    rank, count = max(ends.items(), key=lambda item: (item[1], -item[0]))
    if count > 1 and count == len(slow) and list(ends.values()).count(count) == 1:
        what = " and ".join(f"{sender} to {link.peer} at {_speed(link)}" for sender, link in slow)
        return Verdict(SLOW_RANK, (rank,), f"slow rank: all links at {_named(told[rank])} are slow: {what}")
    sender, link = min(slow, key=lambda item: item[1].speed / max(1.0, item[1].mean))
    way = f"from {_named(told[sender])} to {_named(told[link.peer])}"
    rail = f", rail {link.rail}" if link.rail else ""
    return Verdict(SLOW_LINK, (sender, link.peer), f"slow link: {way}{rail}, {_speed(link)}")


def _speed(link: Outgoing) -> str:
    return f"{link.speed / 1e6:.0f} MB/s instead of {link.mean / 1e6:.0f} MB/s"


def _codes_slowly(told: Mapping[int, Digest]) -> Verdict | None:
    worst = min(told.values(), key=lambda digest: digest.coding)
    others = [digest.coding for digest in told.values() if digest is not worst]
    if worst.coding >= CODES_SLOWLY or worst.delayed > DELAYED or (others and median(others) < CODES_SLOWLY):
        return None
    if worst.pressed:  # those that code may wait for a processor, while the one that asks does not
        return None
    said = f"slow rank: {_named(worst)} encodes and decodes at {worst.coding:.0%} of its usual speed"
    return Verdict(SLOW_RANK, (worst.rank,), said)


def _imbalance(told: Mapping[int, Digest]) -> Verdict | None:
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
    others = median(digest.outside for digest in told.values() if digest is not behind)
    if behind.outside - others < share / 2:
        return None
    where = f"it is outside of calls {behind.outside:.0%} of the time, the others {others:.0%}"
    said = f"imbalance: {_named(behind)} comes late to calls, others wait for it {share:.0%} of the time; {where}"
    return Verdict(IMBALANCE, (rank,), said)


def judge_hang(told: Mapping[int, Digest], ranks: tuple[int, ...], seconds: float) -> Verdict:
    """Say who is behind calls in which nothing moves, by how far each rank has come."""
    silent = [rank for rank in ranks if rank not in told]
    waiting = f"nothing has moved for {seconds:.0f} s"
    if silent:
        who = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
        verb = "do" if len(silent) > 1 else "does"
        return Verdict(HANG, tuple(silent), f"hang: {who} {verb} not answer, and {waiting}")
    for name in dict.fromkeys(name for digest in told.values() for name in digest.begun):
        counts = {rank: digest.begun.get(name, 0) for rank, digest in told.items()}
        most = max(counts.values())
        behind = [rank for rank, count in counts.items() if count < most]
        if behind and any(digest.waits for rank, digest in told.items() if counts[rank] == most):
            return _not_joined(told, behind, name, counts, most, waiting)
    titles = sorted({title for digest in told.values() for title in digest.waits})
    what = f" in {', '.join(titles)}" if titles else ""
    return Verdict(HANG, (), f"hang: all ranks have joined the same calls, and {waiting}{what}")


def _not_joined(
    told: Mapping[int, Digest], behind: list[int], name: str, counts: Mapping[int, int], most: int, waiting: str
) -> Verdict:
    title = next((title for rank, digest in told.items() if counts[rank] == most for title in digest.waits), "a call")
    calls = f"calls {name!r}" if name else "calls"
    each = " and ".join(f"{_named(told[rank])} has begun {counts[rank]}" for rank in behind)
    return Verdict(HANG, tuple(behind), f"hang: {each} of {most} {calls}, others wait in {title}, and {waiting}")
