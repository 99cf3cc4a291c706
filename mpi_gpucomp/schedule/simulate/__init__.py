"""How long a schedule would take on a topology: an event simulation of the engine's rules, and what it shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.errors import ScheduleError, SpecError
from mpi_gpucomp.schedule.cost import FREE
from mpi_gpucomp.schedule.dataflow import Dataflow
from mpi_gpucomp.schedule.ir import COLLECTIVES
from mpi_gpucomp.schedule.simulate.lane import Cores, Rank, Stream, Walk
from mpi_gpucomp.schedule.simulate.network import Clock, Wire
from mpi_gpucomp.schedule.simulate.record import Record, Segment, Simulation

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.cost import CodecCost
    from mpi_gpucomp.schedule.ir import Algorithm
    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["Record", "Segment", "Simulation", "simulate"]


# Runs an algorithm on a topology in the mind.


def simulate(
    algorithm: Algorithm, topology: Topology, nbytes: int, chunk: int, coding: CodecCost | None = None
) -> Simulation:
    """Follow a checked algorithm through a message of `nbytes` (of all blocks together) in chunks of `chunk` bytes.

    `coding` is a codec in numbers; without it elements travel as they are. Each loop has chunks of the same length.
    """
    if algorithm.ranks != topology.ranks:
        raise SpecError(
            f"topology {topology.name}",
            expected=f"{algorithm.ranks} ranks, as algorithm {algorithm.name} has",
            got=str(topology.ranks),
            remedy="Build the algorithm for the ranks of the topology.",
        )
    records: list[Record] = []
    clock = Clock()
    cores = {rank: shared for one in topology.processors for shared in [Cores(one.cores)] for rank in one.ranks}
    wire = Wire(clock, algorithm, topology, records, cores)
    walks: list[Walk] = []
    pieces = _pieces(algorithm, nbytes, chunk)
    for number, program in enumerate(algorithm.programs):
        versions = Dataflow.of(program, algorithm.spec, number)
        stream = Stream(clock, number, records, cores.get(number))
        as_it_is = topology.codecs.get("none", FREE)
        rank = Rank(clock, program.lanes, versions, stream, wire, pieces, (coding or FREE, as_it_is), coding is None)
        rank.finished, rank.causes = [0] * len(program.lanes), [-1] * len(program.lanes)
        for at, lane in enumerate(program.lanes):
            out = None if lane.send is None else wire.connections.get((number, lane.send, lane.channel))
            back = None if lane.receive is None else wire.connections.get((lane.receive, number, lane.channel))
            walks.append(Walk(rank, at, out, back))
    for walk in walks:
        clock.at(0.0, walk.go_on)
    clock.run()
    return Simulation(topology, algorithm.name, algorithm.ranks, records)


def _pieces(algorithm: Algorithm, nbytes: int, chunk: int) -> list[float]:
    """Return the bytes of a chunk in each loop: the last loop has what is left, shared out among its chunks."""
    if chunk < 1:
        raise ScheduleError(
            "chunk", expected="a byte at least", got=str(chunk), remedy="Cut the message into longer chunks."
        )
    blocks = algorithm.ranks if COLLECTIVES[algorithm.collective].blocks else 1
    per_loop = algorithm.chunks // blocks
    left, pieces = nbytes / blocks, list[float]()
    while left > 0:
        pieces.append(min(chunk, left / per_loop))
        left -= chunk * per_loop
    return pieces
