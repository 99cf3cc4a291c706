"""Reads the flight records of all ranks, and says in one sentence who is behind a hang.

It compares how far the ranks have come: one that left no record, one that has not begun what others wait for, a link on
which bytes have been under way while the other side waits for them, or a rank that has nothing to send yet.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.monitor.flight import FILES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    Records = Mapping[int, Mapping[str, Any]]

__all__ = ["Blame", "blame", "read"]

OURS = ("mpi_gpucomp", "mpi4py", "threading.py")
"""Parts of the paths of frames that say nothing of what the program itself is doing."""
LONG_MS = 100.0


class Blame(NamedTuple):
    """Who is behind it, in a sentence."""

    text: str
    ranks: tuple[int, ...] = ()
    """The rank; of a link, from and to; none where nobody is to blame."""


def read(directory: Path) -> dict[int, dict[str, Any]]:
    """Read the newest record of each rank."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(directory.glob(FILES)):
        try:
            one = json.loads(path.read_text(encoding="utf-8"))
            if one["rank"] not in found or one["time"] > found[one["rank"]]["time"]:
                found[one["rank"]] = one
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _refused(f"file {path}", "a flight record", f"{type(error).__name__}: {error}") from error
    if not found:
        raise _refused(f"directory {directory}", f"flight records ({FILES})", "none")
    return found


def _refused(topic: str, expected: str, got: str) -> SpecError:
    remedy = "Set MPI_GPUCOMP_FLIGHT to a directory for the run, and name it here."
    return SpecError(topic, expected=expected, got=got, remedy=remedy)


def blame(records: Records) -> Blame:
    """Say who is behind it."""
    rules = _silent, _behind, _link, _idle
    found = next((said for rule in rules if (said := rule(records)) is not None), None)
    return found or _nobody(records)


def _joined(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _waits(records: Records) -> Iterator[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield what ranks wait for: rank, communicator, call."""
    for rank, record in sorted(records.items()):
        for communicator in record["communicators"]:
            for call in communicator.get("waits", ()):
                yield rank, communicator, call


def _same(record: Mapping[str, Any], communicator: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Find a communicator in another rank's record."""
    key = communicator["world"], communicator["number"]
    return next((one for one in record["communicators"] if (one.get("world"), one.get("number")) == key), None)


def _silent(records: Records) -> Blame | None:
    """Find ranks that have left no record, while others wait in a call with them."""
    size = next(iter(records.values()))["size"]
    missing = [rank for rank in range(size) if rank not in records]
    waiting = [(rank, call) for rank, one, call in _waits(records) if set(missing) & set(one["world"])]
    if not missing or not waiting:
        return None
    who, ranks = sorted({rank for rank, _ in waiting}), _joined(missing)
    many = len(missing) > 1
    title = waiting[0][1]["title"]
    said = f"{ranks} {'are' if many else 'is'} behind it: {'they' if many else 'it'} left no record (dead or stopped)"
    return Blame(f"{said}, and {_joined(who)} wait{'s' * (len(who) == 1)} in {title}.", tuple(missing))


def _behind(records: Records) -> Blame | None:
    """Find a rank that has not begun a call that others wait for."""
    late: dict[int, tuple[Mapping[str, Any], int, set[int]]] = {}
    for waiting, communicator, call in _waits(records):
        for rank in communicator["world"]:
            own = _same(records[rank], communicator) if rank in records else None
            begun = own["begun"].get(call["name"], 0) if own else 0
            if rank in records and begun < call["run"]:
                late.setdefault(rank, (call, begun, set()))[2].add(waiting)
    if not late:
        return None
    # One that waits for nothing itself is where a chain of ranks that wait for each other ends.
    free = [rank for rank in late if not any(one["waits"] for one in records[rank]["communicators"] if one)]
    rank = min(free or late, key=lambda rank: (late[rank][1] - late[rank][0]["run"], rank))
    call, begun, waiting_ranks = late[rank]
    who = sorted(waiting_ranks)
    said = f"rank {rank} ({records[rank]['host']}) is behind it: it has begun {begun} of {call['run']} calls"
    named = f" named {call['name']!r}" if call["name"] else ""
    verb = "waits" if len(who) == 1 else "wait"
    return Blame(f"{said}{named}, {_joined(who)} {verb} in {call['title']}{_whereabouts(records[rank])}.", (rank,))


def _whereabouts(record: Mapping[str, Any]) -> str:
    """Say where the main thread is, by the innermost line of the program itself."""
    frames = record["threads"].get("MainThread", ())
    own = [frame for frame in frames if not any(part in frame for part in OURS)]
    if not own:
        return ""
    place, _, name = own[-1].rpartition(" ")
    return f"; it is at {place.rpartition('/')[2]} in {name}"


def _calls(records: Records) -> Iterator[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    for rank, record in sorted(records.items()):
        for communicator in record["communicators"]:
            for call in communicator.get("calls", ()):
                yield rank, communicator, call


def _starving(records: Records) -> dict[tuple[int, int], float]:
    """Return the links that a receiver waits on, from and to, and for how many milliseconds."""
    return {
        (one["rank"], rank): one["waited_ms"]
        for rank, _, call in _calls(records)
        for one in call["receiving"]
        if one["waited_ms"] is not None and one["waited_ms"] >= LONG_MS
    }


def _link(records: Records) -> Blame | None:
    """Find a link with bytes under way that the other side waits for."""
    starving = _starving(records)
    stuck: dict[tuple[int, int], tuple[int, float, str]] = {}
    for rank, _, call in _calls(records):
        for one in call["sending"]:
            key = rank, one["rank"]
            if key in starving and one["ms"] >= LONG_MS:
                nbytes, longest, _ = stuck.get(key, (0, 0.0, ""))
                stuck[key] = nbytes + one["bytes"], max(longest, one["ms"]), call["title"]
    if not stuck:
        return None
    (sender, receiver), (nbytes, longest, title) = max(stuck.items(), key=lambda item: item[1][1])
    said = f"the link from rank {sender} to rank {receiver} is behind it: {nbytes / 1e6:.1f} MB of {title} have been"
    return Blame(f"{said} under way for {longest / 1e3:.1f} s, and rank {receiver} waits for them.", (sender, receiver))


def _idle(records: Records) -> Blame | None:
    """Find a rank that others starve for, and that waits for nobody: it is busy with itself."""
    starving = _starving(records)
    waiting = {receiver for _, receiver in starving}
    free = sorted({sender for sender, _ in starving if sender in records and sender not in waiting})
    if not free:
        return None
    rank = free[0]
    who = sorted(receiver for sender, receiver in starving if sender == rank)
    coding = any(call["coding"] for other, _, call in _calls(records) if other == rank)
    why = "it encodes or decodes" if coding else "it has nothing under way to them"
    verb = "waits" if len(who) == 1 else "wait"
    return Blame(
        f"rank {rank} ({records[rank]['host']}) is behind it: {_joined(who)} {verb} for it, and {why}.", (rank,)
    )


def _nobody(records: Records) -> Blame:
    broken = {one["broken"] for record in records.values() for one in record["communicators"] if one.get("broken")}
    if broken:
        return Blame(f"nobody waits any more; a call has failed: {sorted(broken)[0]}")
    if any(True for _ in _waits(records)):
        return Blame("all ranks have begun what they wait for, and nothing has been under way for long: no hang shows")
    return Blame("no rank waits for another: no hang shows")
