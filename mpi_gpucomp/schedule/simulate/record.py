"""What a simulation has found: when each message and each coding began and ended, and what it waited for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["Record", "Segment", "Simulation"]


class Record(NamedTuple):
    """A message (`send`), work on a rank's stream (`encode`, `decode`, `reduce`, `copy`) or on messages (`handle`)."""

    kind: str
    rank: int
    peer: int
    """The receiver of a message; -1 for work."""
    loop: int
    nbytes: float
    """As it travels, or as it is worked on."""
    start: float
    end: float
    cause: int
    """The number of the record whose end let this one begin; -1 for the start of all."""

    def __str__(self) -> str:
        """Say who does what."""
        return f"{self.rank} -> {self.peer}" if self.kind == "send" else f"rank {self.rank} {self.kind}s"


class Segment(NamedTuple):
    """A part of the critical path: one after the other, the same thing so many times."""

    what: str
    times: int
    seconds: float


@dataclass(frozen=True)
class Simulation:
    """The outcome: all records in the order of their beginnings, as far as that is known."""

    topology: Topology
    algorithm: str
    ranks: int
    records: list[Record]

    @cached_property
    def seconds(self) -> float:
        """Return the time until the last rank has its result."""
        return max((record.end for record in self.records), default=0.0)

    @cached_property
    def links(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Return for each link that was used its bytes, and the seconds that it was in use."""
        found: defaultdict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for record in self.records:
            if record.kind == "send":
                link = found[record.rank, record.peer]
                link[0] += record.nbytes
                link[1] += record.end - record.start
        return {pair: (nbytes, busy) for pair, (nbytes, busy) in found.items()}

    @cached_property
    def loads(self) -> dict[str, tuple[float, float]]:
        """Return for each link and port that was used its bytes, and the seconds that its rate alone asks for."""
        found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for (sender, receiver), (nbytes, _) in self.links.items():
            link = self.topology.link(sender, receiver)
            assert link is not None
            shares = [(f"{sender} -> {receiver}", link.per_byte)]
            ports = (self.topology.ports[number] for number in self.topology.ports_of(sender, receiver))
            shares += [(port.name, port.per_byte) for port in ports]
            for name, per_byte in shares:
                found[name][0] += nbytes
                found[name][1] += nbytes * per_byte
        return {name: (nbytes, seconds) for name, (nbytes, seconds) in found.items()}

    def busiest(self) -> tuple[str, float, float]:
        """Return the link or port with most to do, its bytes, and the share of the time that this takes."""
        if not self.loads:
            return "none", 0.0, 0.0
        name = max(self.loads, key=lambda key: self.loads[key][1])
        nbytes, seconds = self.loads[name]
        return name, nbytes, seconds / self.seconds

    def critical_path(self) -> list[Segment]:
        """Return what the end waited for, from the start on; what repeats itself is counted."""
        records = list(self._chain())[::-1]
        segments: list[Segment] = []
        for at, record in enumerate(records):
            begun = records[at - 1].end if at else 0.0
            seconds = record.end - max(begun, record.start)
            if segments and segments[-1].what == str(record):
                last = segments[-1]
                segments[-1] = Segment(last.what, last.times + 1, last.seconds + seconds)
            else:
                segments.append(Segment(str(record), 1, seconds))
        return segments

    def _chain(self) -> Iterator[Record]:
        if not self.records:
            return
        number = max(range(len(self.records)), key=lambda at: self.records[at].end)
        while number >= 0:
            yield self.records[number]
            number = self.records[number].cause

    def trace(self) -> dict[str, Any]:
        """Return it in Chrome's trace format: a process for each rank, a row for its stream and each peer."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
            for rank in range(self.ranks)
        ]
        rows = sorted({(record.rank, record.peer) for record in self.records})
        events += [
            {"ph": "M", "pid": rank, "tid": peer + 1, "name": "thread_name", "args": {"name": _row(peer)}}
            for rank, peer in rows
        ]
        events += [
            {
                "ph": "X",
                "pid": record.rank,
                "tid": record.peer + 1,
                "name": f"{record.kind} loop {record.loop}",
                "ts": record.start * 1e6,
                "dur": (record.end - record.start) * 1e6,
                "args": {"bytes": round(record.nbytes)},
            }
            for record in self.records
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _row(peer: int) -> str:
    return "stream" if peer < 0 else f"to {peer}"
