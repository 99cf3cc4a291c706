"""Discrete-event simulation of an algorithm on a topology, by the rules of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.errors import ScheduleError, SpecError
from mpi_gpucomp.schedule.cost import FREE
from mpi_gpucomp.schedule.dataflow import Dataflow
from mpi_gpucomp.schedule.ir import COLLECTIVES
from mpi_gpucomp.schedule.simulate.lane import LaneRun, RankState
from mpi_gpucomp.schedule.simulate.record import PathPart, Record, Simulation
from mpi_gpucomp.schedule.simulate.resources import Cores, EventQueue, Interconnect, RankQueue

if TYPE_CHECKING:
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
