"""Discrete-event simulation of an algorithm on a topology, by the rules of the engine.

The result has start, end and cause of every message and of all work on chunks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi_gpucomp.errors import ScheduleError, SpecError
from mpi_gpucomp.schedule.cost import FREE
from mpi_gpucomp.schedule.dataflow import Dataflow
from mpi_gpucomp.schedule.ir import COLLECTIVES
from mpi_gpucomp.schedule.simulate.lane import CopyQueues, LaneRun, RankState
from mpi_gpucomp.schedule.simulate.resources import Cores, EventQueue, Interconnect, RankQueue, Record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi_gpucomp.schedule.cost import CodecCost
    from mpi_gpucomp.schedule.ir import Algorithm
    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["PathPart", "Record", "Simulation", "simulate"]


def simulate(
    algorithm: Algorithm, topology: Topology, nbytes: int, chunk: int, codec: CodecCost | None = None
) -> Simulation:
    """Simulate a checked algorithm on a message of `nbytes` (of all blocks together) in chunks of `chunk` bytes.

    `codec` is the cost of a codec; without it elements are sent raw. All chunks of a loop have the same length.
    """
    if algorithm.ranks != topology.ranks:
        raise SpecError(
            f"topology {topology.name}",
            expected=f"{algorithm.ranks} ranks, as in algorithm {algorithm.name}",
            got=str(topology.ranks),
            remedy="Build the algorithm for the ranks of the topology.",
        )
    records: list[Record] = []
    events = EventQueue()
    cores = {rank: shared for one in topology.processors for shared in [Cores(one.cores)] for rank in one.ranks}
    network = Interconnect(events, algorithm, topology, records, cores)
    costs = codec or FREE, topology.codecs.get("none", FREE)
    chunk_bytes = _chunk_bytes(algorithm, nbytes, chunk)
    runs: list[LaneRun] = []
    for number, program in enumerate(algorithm.programs):
        flow = Dataflow.of(program, algorithm.spec, number)
        coder = RankQueue(events, number, records, cores.get(number))
        rank = RankState(events, program.lanes, flow, coder, network, chunk_bytes, costs, codec is None)
        if topology.staging is not None:
            rank.copies = CopyQueues(topology.staging, *(RankQueue(events, number, records, None) for _ in range(2)))
        rank.finished, rank.causes = [0] * len(program.lanes), [-1] * len(program.lanes)
        for at, lane in enumerate(program.lanes):
            out = None if lane.send is None else network.connections.get((number, lane.send, lane.channel))
            back = None if lane.receive is None else network.connections.get((lane.receive, number, lane.channel))
            runs.append(LaneRun(rank, at, out, back))
    for run in runs:
        events.at(0.0, run.resume)
    events.run()
    return Simulation(topology, algorithm.name, algorithm.ranks, records)


def _chunk_bytes(algorithm: Algorithm, nbytes: int, chunk: int) -> list[float]:
    """Return the bytes of a chunk in each loop; the chunks of the last loop share the rest."""
    if chunk < 1:
        raise ScheduleError("chunk", expected="1 byte or more", got=str(chunk), remedy="Use longer chunks.")
    blocks = algorithm.ranks if COLLECTIVES[algorithm.collective].blocks else 1
    per_loop = algorithm.chunks // blocks
    left, sizes = nbytes / blocks, list[float]()
    while left > 0:
        sizes.append(min(chunk, left / per_loop))
        left -= chunk * per_loop
    return sizes


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
