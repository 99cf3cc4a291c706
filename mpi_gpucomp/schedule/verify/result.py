"""Runs an algorithm on the names of contributions instead of numbers, and compares the end with the goal."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.verify.diagnostics import StepRef, fault, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.errors import ScheduleError
    from mpi_gpucomp.schedule.ir import Algorithm, CollectiveSpec, Place, Step

__all__ = ["NAMES", "Memory", "check_result"]


# The buffers of a rank as one row of cells, a cell for each chunk, so that two names of one chunk are one cell.

NAMES = {"i": "input", "o": "output", "s": "scratch"}


class Memory:
    """Where the chunks of a rank's buffers lie; scratch comes last, and may be of any length."""

    def __init__(self, goal: CollectiveSpec, rank: int, scratch: int = 0) -> None:
        """Lay the buffers out for a goal."""
        inputs, outputs, own = goal.input_chunks(rank), goal.output_chunks(rank), rank * goal.block
        self.lengths = {"i": inputs, "o": outputs, "s": scratch}
        start = {"i": outputs, "o": 0, "s": inputs + outputs}
        if goal.aliased(rank):
            start = {"i": 0, "o": 0, "s": max(inputs, outputs)}
            if inputs != outputs:
                start["i" if inputs < outputs else "o"] = own
        self.start = start
        self.size = start["s"] + scratch
        free_input = goal.aliased(rank) and goal.collective == "reduce_scatter"
        kept = () if free_input else range(start["i"], start["i"] + inputs)
        self._kept = frozenset(kept) - frozenset(range(start["o"], start["o"] + outputs))

    def cells(self, place: Place, count: int = 1) -> range:
        """Return the cells of `count` chunks from a place on."""
        first = self.start[place.buffer] + place.offset
        return range(first, first + count)

    def holds(self, place: Place, count: int) -> bool:
        """Say whether so many chunks from a place on are inside its buffer."""
        return place.offset >= 0 and place.offset + count <= self.lengths[place.buffer]

    def may_write(self, cell: int) -> bool:
        """Say whether a cell is not one of the caller's that must stay as it is."""
        return cell not in self._kept

    def name(self, cell: int) -> str:
        """Name a cell as people do."""
        for buffer in ("o", "i", "s"):
            offset = cell - self.start[buffer]
            if 0 <= offset < self.lengths[buffer]:
                return f"{NAMES[buffer]} chunk {offset}"
        return f"scratch chunk {cell - self.start['s']}"


def check_result(algorithm: Algorithm, order: Sequence[StepRef]) -> None:
    """Run the steps in this order; raise ScheduleError where the outcome is not the collective's."""
    replay = _Replay(algorithm)
    for spot in order:
        replay.run(spot)
    for rank in range(algorithm.ranks):
        replay.compare(rank)


class _Replay:
    """What every chunk of every rank holds, and the messages on their way."""

    def __init__(self, algorithm: Algorithm) -> None:
        """Fill the inputs."""
        self._algorithm, self._goal = algorithm, algorithm.spec
        programs = algorithm.programs
        self._memory = [Memory(self._goal, rank, program.scratch_chunks) for rank, program in enumerate(programs)]
        self._held = [[0] * memory.size for memory in self._memory]
        self._messages: defaultdict[tuple[int, int, int], deque[list[int]]] = defaultdict(deque)
        for rank, memory in enumerate(self._memory):
            first = memory.start["i"]
            self._held[rank][first : first + memory.lengths["i"]] = self._goal.precondition(rank)

    def run(self, spot: StepRef) -> None:
        """Do one step."""
        lane = self._algorithm.programs[spot.rank].lanes[spot.lane]
        step = lane.steps[spot.step]
        if step.kind == "nop":
            return
        if step.receives and lane.receive is not None:
            values = self._messages[lane.receive, spot.rank, lane.channel].popleft()
            if step.reduces:
                values = self._sum(spot, step, values, self._read(spot, step.source, step.count))
        else:
            values = self._read(spot, step.source, step.count)
            if step.reduces:
                values = self._sum(spot, step, values, self._read(spot, step.target, step.count))
        if step.writes:
            cells = self._memory[spot.rank].cells(step.writes, step.count)
            self._held[spot.rank][cells.start : cells.stop] = values
        if step.sends and lane.send is not None:
            self._messages[spot.rank, lane.send, lane.channel].append(values)

    def _read(self, spot: StepRef, place: Place | None, count: int) -> list[int]:
        assert place is not None
        memory = self._memory[spot.rank]
        cells = memory.cells(place, count)
        values = self._held[spot.rank][cells.start : cells.stop]
        if 0 in values:
            name = memory.name(cells[values.index(0)])
            remedy = "Fill it first, or read elsewhere."
            raise fault(self._algorithm, spot, name, "something to read", "a chunk that holds nothing yet", remedy)
        return values

    def _sum(self, spot: StepRef, step: Step, left: list[int], right: list[int]) -> list[int]:
        ranks = self._goal.ranks
        for position, (one, other) in enumerate(zip(left, right, strict=True)):
            if one >> ranks != other >> ranks or one & other & (1 << ranks) - 1:
                raise self._wrong_sum(spot, step, position, one, other)
        return [one | other for one, other in zip(left, right, strict=True)]

    def _wrong_sum(self, spot: StepRef, step: Step, position: int, one: int, other: int) -> ScheduleError:
        place = step.writes or step.source
        assert place is not None
        memory = self._memory[spot.rank]
        name = memory.name(memory.cells(place, step.count)[position])
        expected = "two sums of the same chunk without a rank in common"
        got = f"{described(self._goal, one)} and {described(self._goal, other)}"
        return fault(self._algorithm, spot, name, expected, got, "Add each rank's share to a sum once.")

    def compare(self, rank: int) -> None:
        """Compare a rank's output with what it must be."""
        memory = self._memory[rank]
        for chunk, wanted in enumerate(self._goal.postcondition(rank)):
            held = self._held[rank][memory.start["o"] + chunk]
            if held != wanted:
                expected, got = (described(self._goal, contents) for contents in (wanted, held))
                remedy = "Follow the chunk through the schedule to the step that is missing or wrong."
                raise fault(self._algorithm, rank, f"output chunk {chunk}", expected, got, remedy)


def described(goal: CollectiveSpec, contents: int) -> str:
    """Say in words what a place holds."""
    chunk, ranks = goal.decompose(contents)
    if not ranks:
        return "nothing"
    many = len(ranks) > 1
    return f"{'the sum of ' * many}chunk {chunk} of rank{'s' * many} {listed(ranks)}"
