"""Blame: compares the flight records of all ranks and names the cause of a hang in one sentence.

The cause is a rank without a record, a rank that has not begun a call that others wait in, a link whose bytes have been
in flight while the receiver waits for them, or a rank with nothing in flight to those that wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.monitor.flight import FILES, read_flight

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    Records = Mapping[int, Mapping[str, Any]]

__all__ = ["Blame", "blame", "read"]

OURS = ("mpi_gpucomp", "mpi4py", "threading.py")
"""Parts of the paths of stack frames that are not the program's."""
LONG_MS = 100.0


class Blame(NamedTuple):
    """The cause of a hang."""

    text: str
    ranks: tuple[int, ...] = ()
    """The rank; of a link, its two ends; none without a cause."""


def read(directory: Path) -> dict[int, dict[str, Any]]:
    """Read the newest record of each rank; raise SpecError for a file that is no flight record."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(directory.glob(FILES)):
        record = read_flight(path)
        if record["rank"] not in found or record["time"] > found[record["rank"]]["time"]:
            found[record["rank"]] = record
    if not found:
        remedy = "Set MPI_GPUCOMP_FLIGHT to a directory for the run, and name it here."
        raise SpecError(f"directory {directory}", expected=f"flight records ({FILES})", got="none", remedy=remedy)
    return found


def blame(records: Records) -> Blame:
    """Name the cause of a hang."""
    rules = _silent, _behind, _link, _idle
    found = next((cause for rule in rules if (cause := rule(records)) is not None), None)
    return found or _no_hang(records)


def _joined(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _waits(records: Records) -> Iterator[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the calls that ranks are blocked in: rank, communicator, call."""
    for rank, record in sorted(records.items()):
        for communicator in record["communicators"]:
            for call in communicator["waits"]:
                yield rank, communicator, call


def _same(record: Mapping[str, Any], communicator: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Find a communicator in another rank's record."""
    key = communicator["world"], communicator["number"]
    return next((one for one in record["communicators"] if (one["world"], one["number"]) == key), None)


def _silent(records: Records) -> Blame | None:
    """Find ranks without a record while others wait in a call with them."""
    size = next(iter(records.values()))["size"]
    missing = [rank for rank in range(size) if rank not in records]
    waiting = [(rank, call) for rank, one, call in _waits(records) if set(missing) & set(one["world"])]
    if not missing or not waiting:
        return None
    who, ranks = sorted({rank for rank, _ in waiting}), _joined(missing)
    many = len(missing) > 1
    title = waiting[0][1]["title"]
    cause = f"{ranks} {'are' if many else 'is'} behind it: {'they' if many else 'it'} left no record (dead or stopped)"
    return Blame(f"{cause}, and {_joined(who)} wait{'s' * (len(who) == 1)} in {title}.", tuple(missing))


def _behind(records: Records) -> Blame | None:
    """Find a rank that has not begun a call that others wait in."""
    late: dict[int, tuple[Mapping[str, Any], int, set[int]]] = {}
    for waiting, communicator, call in _waits(records):
        for rank in communicator["world"]:
            own = _same(records[rank], communicator) if rank in records else None
            begun = own["begun"].get(call["name"], 0) if own else 0
            if rank in records and begun < call["run"]:
                late.setdefault(rank, (call, begun, set()))[2].add(waiting)
    if not late:
        return None
    # A chain of ranks that wait for each other ends at one that waits for none.
    free = [rank for rank in late if not any(one["waits"] for one in records[rank]["communicators"])]
    rank = min(free or late, key=lambda rank: (late[rank][1] - late[rank][0]["run"], rank))
    call, begun, waiting_ranks = late[rank]
    who = sorted(waiting_ranks)
    cause = f"rank {rank} ({records[rank]['host']}) is behind it: it has begun {begun} of {call['run']} calls"
    named = f" named {call['name']!r}" if call["name"] else ""
    verb = "waits" if len(who) == 1 else "wait"
    return Blame(f"{cause}{named}, {_joined(who)} {verb} in {call['title']}{_location(records[rank])}.", (rank,))


def _location(record: Mapping[str, Any]) -> str:
    """Return where the main thread is: the innermost line of the program itself."""
    frames = record["threads"].get("MainThread", ())
    own = [frame for frame in frames if not any(part in frame for part in OURS)]
    if not own:
        return ""
    place, _, name = own[-1].rpartition(" ")
    return f"; it is at {place.rpartition('/')[2]} in {name}"


def _calls(records: Records) -> Iterator[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    for rank, record in sorted(records.items()):
        for communicator in record["communicators"]:
            for call in communicator["calls"]:
                yield rank, communicator, call


def _recv_waits(records: Records) -> dict[tuple[int, int], float]:
    """Return the links that a receiver waits on, by their ends, and for how many milliseconds."""
    return {
        (one["rank"], rank): one["waited_ms"]
        for rank, _, call in _calls(records)
        for one in call["receiving"]
        if one["waited_ms"] is not None and one["waited_ms"] >= LONG_MS
    }


def _link(records: Records) -> Blame | None:
    """Find a link with bytes in flight that the receiver waits for."""
    waits = _recv_waits(records)
    stuck: dict[tuple[int, int], tuple[int, float, str]] = {}
    for rank, _, call in _calls(records):
        for one in call["sending"]:
            key = rank, one["rank"]
            if key in waits and one["ms"] >= LONG_MS:
                nbytes, longest, _ = stuck.get(key, (0, 0.0, ""))
                stuck[key] = nbytes + one["bytes"], max(longest, one["ms"]), call["title"]
    if not stuck:
        return None
    (sender, receiver), (nbytes, longest, title) = max(stuck.items(), key=lambda item: item[1][1])
    cause = f"the link from rank {sender} to rank {receiver} is behind it: {nbytes / 1e6:.1f} MB of {title} have been"
    return Blame(
        f"{cause} in flight for {longest / 1e3:.1f} s, and rank {receiver} waits for them.", (sender, receiver)
    )


def _idle(records: Records) -> Blame | None:
    """Find a rank that others wait for, and that waits for none: it is busy itself."""
    waits = _recv_waits(records)
    waiting = {receiver for _, receiver in waits}
    free = sorted({sender for sender, _ in waits if sender in records and sender not in waiting})
    if not free:
        return None
    rank = free[0]
    who = sorted(receiver for sender, receiver in waits if sender == rank)
    coding = any(call["coding"] for other, _, call in _calls(records) if other == rank)
    why = "it encodes or decodes" if coding else "it has nothing in flight to them"
    verb = "waits" if len(who) == 1 else "wait"
    return Blame(
        f"rank {rank} ({records[rank]['host']}) is behind it: {_joined(who)} {verb} for it, and {why}.", (rank,)
    )


def _no_hang(records: Records) -> Blame:
    failures = {one["failure"] for record in records.values() for one in record["communicators"] if one["failure"]}
    if failures:
        return Blame(f"no rank waits any more; a call has failed: {sorted(failures)[0]}")
    if any(True for _ in _waits(records)):
        return Blame(
            "all ranks have begun the calls that they wait in, and nothing has been in flight for long: no hang"
        )
    return Blame("no rank waits for another: no hang")
