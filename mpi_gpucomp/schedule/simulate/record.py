"""The result of a simulation: start, end and cause of every message and of all work on chunks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["PathPart", "Record", "Simulation"]


class Record(NamedTuple):
    """A message (`send`), work on a chunk (`encode`, `decode`, `reduce`, `copy`) or on a message (`handle`)."""

    kind: str
    rank: int
    peer: int
    """The receiver of a message; -1 for work."""
    loop: int
    nbytes: float
    """Bytes sent, or worked on."""
    start: float
    end: float
    cause: int
    """The number of the record whose end allowed this one to start; -1 for none."""

    def __str__(self) -> str:
        """Return sender and receiver, or the rank and its work."""
        return f"{self.rank} -> {self.peer}" if self.kind == "send" else f"rank {self.rank} {self.kind}s"


class PathPart(NamedTuple):
    """Consecutive records of the critical path with the same activity."""

    activity: str
    times: int
    seconds: float


@dataclass(frozen=True)
class Simulation:
    """The result: all records, roughly in the order of their starts."""

    topology: Topology
    algorithm: str
    ranks: int
    records: list[Record]

    @cached_property
    def seconds(self) -> float:
        """The time until the last rank has its result."""
        return max((record.end for record in self.records), default=0.0)

    @cached_property
    def links(self) -> dict[tuple[int, int], tuple[float, float]]:
        """The bytes of each link, and the seconds that it was in use."""
        found: defaultdict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for record in self.records:
            if record.kind == "send":
                link = found[record.rank, record.peer]
                link[0] += record.nbytes
                link[1] += record.end - record.start
        return {pair: (nbytes, busy) for pair, (nbytes, busy) in found.items()}

    @cached_property
    def loads(self) -> dict[str, tuple[float, float]]:
        """The bytes of each link and port, and the seconds that they take at its full rate."""
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
        """Return the most loaded link or port, its bytes, and its utilisation."""
        if not self.loads:
            return "none", 0.0, 0.0
        name = max(self.loads, key=lambda key: self.loads[key][1])
        nbytes, seconds = self.loads[name]
        return name, nbytes, seconds / self.seconds

    def critical_path(self) -> list[PathPart]:
        """Return the chain of causes of the last event, from the start on, with repetitions counted."""
        records = list(self._chain())[::-1]
        parts: list[PathPart] = []
        for at, record in enumerate(records):
            ended = records[at - 1].end if at else 0.0
            seconds = record.end - max(ended, record.start)
            if parts and parts[-1].activity == str(record):
                last = parts[-1]
                parts[-1] = PathPart(last.activity, last.times + 1, last.seconds + seconds)
            else:
                parts.append(PathPart(str(record), 1, seconds))
        return parts

    def _chain(self) -> Iterator[Record]:
        if not self.records:
            return
        number = max(range(len(self.records)), key=lambda at: self.records[at].end)
        while number >= 0:
            yield self.records[number]
            number = self.records[number].cause

    def trace(self) -> dict[str, Any]:
        """Return the records in Chrome's trace format: a process per rank, a row for its work and for each peer."""
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
    return "work" if peer < 0 else f"to {peer}"
