"""What each send of a program really sends, so that a chunk is encoded once however often it leaves.

A *version* of a chunk is what one step has written there (or what was there at the start). All sends of one version
can share one frame: the one that arrived with it, where the step received it as it is, or the first one that is made
of it. So a compressed chunk is forwarded as it came, and a lossy error is made once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.verify.result import Memory

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm, CollectiveSpec, Program, Step

__all__ = ["ChunkValue", "Versions", "chunk_values"]


@dataclass(eq=False)
class ChunkValue:
    """What a chunk holds from one write to the next."""

    uses: int = 0
    """How many sends want it."""
    plain_uses: int = 0
    """How many of them as it is, in lanes that do not encode."""
    final: bool = True
    """Whether it is still there at the end, where it may be written."""
    stays: bool = True
    """Whether nothing is written over it."""
    given: bool = False
    """Whether it was there at the start."""
    first: bool = False
    """Whether it was written where nothing had been read or written before, so that it may arrive at any time."""
    touched: bool = False
    """Whether a step reads it."""

    def wanted(self, plain: bool) -> int:
        """Return how many sends want it as it is, or encoded."""
        return self.plain_uses if plain else self.uses - self.plain_uses


@dataclass
class Versions:
    """The version that each step reads and writes, for each of its chunks, by lane and step."""

    read: dict[tuple[int, int], list[ChunkValue]] = field(default_factory=dict)
    written: dict[tuple[int, int], list[ChunkValue]] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, goal: CollectiveSpec, rank: int) -> Versions:
        """Follow the steps of a checked program in an order that their dependencies allow."""
        memory = Memory(goal, rank, program.scratch_chunks)
        cells = [ChunkValue(final=memory.may_write(cell), given=True) for cell in range(memory.size)]
        found = cls()
        for key, step in _in_order(program):
            found._follow(key, step, program.lanes[key[0]].raw, memory, cells)
        return found

    def kept(self, lane: int) -> int:
        """Return how many frames of a lane may have to wait, in each loop, for sends of other lanes."""
        arrived = (v for key, versions in self.written.items() if key[0] == lane for v in versions)
        made = (v for key, versions in self.read.items() if key[0] == lane for v in versions)
        return sum(version.uses > 0 for version in arrived) + sum(version.uses > 1 for version in made)

    def _follow(self, key: tuple[int, int], step: Step, plain: bool, memory: Memory, cells: list[ChunkValue]) -> None:
        for place in step.reads:
            for cell in memory.cells(place, step.count):
                cells[cell].touched = True
        if step.kind == "s" and step.source:
            self.read[key] = [cells[cell] for cell in memory.cells(step.source, step.count)]
            for version in self.read[key]:
                version.uses += 1
                version.plain_uses += plain
        if step.writes:
            fresh = []
            for cell in memory.cells(step.writes, step.count):
                before = cells[cell]
                before.final = before.stays = False
                cells[cell] = ChunkValue(first=before.given and not before.touched)
                fresh.append(cells[cell])
            self.written[key] = fresh


_known: dict[tuple[int, int], tuple[Algorithm, Versions]] = {}
"""By identity, with the algorithm kept alive: to compare two programs would take longer than to follow one."""
MOST_KNOWN = 256


def chunk_values(algorithm: Algorithm, rank: int) -> Versions:
    """Return the versions of a rank's program, worked out once."""
    key = id(algorithm), rank
    if key not in _known:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = algorithm, Versions.of(algorithm.programs[rank], algorithm.spec, rank)
    return _known[key][1]


def _in_order(program: Program) -> list[tuple[tuple[int, int], Step]]:
    """Return all steps so that each comes after those it waits for."""
    position = [0] * len(program.lanes)
    order: list[tuple[tuple[int, int], Step]] = []
    moved = True
    while moved:
        moved = False
        for number, lane in enumerate(program.lanes):
            while position[number] < len(lane.steps):
                step = lane.steps[position[number]]
                if any(position[other] <= index for other, index in step.after):
                    break
                order.append(((number, position[number]), step))
                position[number] += 1
                moved = True
    return order
