"""Data flow of a program: which value each send sends, so that a chunk is encoded once however often it is sent.

A *value* of a chunk lasts from the step that wrote it (or the start of the loop) until the next write. All sends of one
value can share one frame: the frame that it arrived in, if it was received unchanged, or the frame that the first send
encodes. A compressed chunk is therefore forwarded without recoding, and a lossy error is introduced only once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.ir import BufferMap

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm, CollectiveSpec, Program, Step

__all__ = ["ChunkValue", "Dataflow", "dataflow"]


@dataclass(eq=False)
class ChunkValue:
    """The content of a chunk from one write to the next."""

    sends: int = 0
    """Number of sends that use it."""
    raw_sends: int = 0
    """Number of those that send it raw."""
    final: bool = True
    """True if it is in writable memory and still there at the end of the loop."""
    persists: bool = True
    """True if it is never overwritten."""
    initial: bool = False
    """True if it was there at the start of the loop."""
    first_write: bool = False
    """True if no earlier step reads or writes the chunk, so that it may arrive at any time."""
    is_read: bool = False
    """True if a step reads it."""

    def sends_as(self, raw: bool) -> int:
        """Return the number of sends that need it raw, or encoded."""
        return self.raw_sends if raw else self.sends - self.raw_sends


@dataclass
class Dataflow:
    """The values that each step reads and writes, one for each of its chunks, by (lane, step)."""

    read: dict[tuple[int, int], list[ChunkValue]] = field(default_factory=dict)
    written: dict[tuple[int, int], list[ChunkValue]] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, spec: CollectiveSpec, rank: int) -> Dataflow:
        """Analyse a checked program."""
        buffers = BufferMap(spec, rank, program.scratch_chunks)
        cells = [ChunkValue(final=buffers.writable(cell), initial=True) for cell in range(buffers.size)]
        flow = cls()
        for key, step in _topological_order(program):
            flow._add_step(key, step, program.lanes[key[0]].raw, buffers, cells)
        return flow

    def shared_frames(self, lane: int) -> int:
        """Return how many frames of a lane, per loop, may have to be kept for the sends of other lanes."""
        received = (value for key, values in self.written.items() if key[0] == lane for value in values)
        encoded = (value for key, values in self.read.items() if key[0] == lane for value in values)
        return sum(value.sends > 0 for value in received) + sum(value.sends > 1 for value in encoded)

    def _add_step(
        self, key: tuple[int, int], step: Step, raw: bool, buffers: BufferMap, cells: list[ChunkValue]
    ) -> None:
        for place in step.reads:
            for cell in buffers.cells(place, step.count):
                cells[cell].is_read = True
        if step.kind == "s" and step.source:
            self.read[key] = [cells[cell] for cell in buffers.cells(step.source, step.count)]
            for value in self.read[key]:
                value.sends += 1
                value.raw_sends += raw
        if step.writes:
            written = []
            for cell in buffers.cells(step.writes, step.count):
                before = cells[cell]
                before.final = before.persists = False
                cells[cell] = ChunkValue(first_write=before.initial and not before.is_read)
                written.append(cells[cell])
            self.written[key] = written


_cache: dict[tuple[int, int], tuple[Algorithm, Dataflow]] = {}
"""Keyed by identity, with a reference to the algorithm: comparing two programs takes longer than analysing one."""
CACHE_SIZE = 256


def dataflow(algorithm: Algorithm, rank: int) -> Dataflow:
    """Return the data flow of a rank's program, from a cache if it is there."""
    key = id(algorithm), rank
    if key not in _cache:
        if len(_cache) >= CACHE_SIZE:
            _cache.clear()
        _cache[key] = algorithm, Dataflow.of(algorithm.programs[rank], algorithm.spec, rank)
    return _cache[key][1]


def _topological_order(program: Program) -> list[tuple[tuple[int, int], Step]]:
    """Return all steps, each after its dependencies."""
    position = [0] * len(program.lanes)
    order: list[tuple[tuple[int, int], Step]] = []
    advanced = True
    while advanced:
        advanced = False
        for number, lane in enumerate(program.lanes):
            while position[number] < len(lane.steps):
                step = lane.steps[position[number]]
                if any(position[other] <= index for other, index in step.after):
                    break
                order.append(((number, position[number]), step))
                position[number] += 1
                advanced = True
    return order
