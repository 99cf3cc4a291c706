"""Executes an algorithm on symbolic values, and compares the outputs with the collective's postcondition."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.ir import BufferMap
from mpi_gpucomp.schedule.verify.structure import StepRef, error_at, format_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.errors import ScheduleError
    from mpi_gpucomp.schedule.ir import Algorithm, CollectiveSpec, Place, Step

__all__ = ["check_result"]


def check_result(algorithm: Algorithm, order: Sequence[StepRef]) -> None:
    """Execute the steps in this order; raise ScheduleError if an output is wrong."""
    replay = _Replay(algorithm)
    for ref in order:
        replay.run(ref)
    for rank in range(algorithm.ranks):
        replay.check_output(rank)


class _Replay:
    """The value of every chunk of every rank, and the messages in flight."""

    def __init__(self, algorithm: Algorithm) -> None:
        """Start from the precondition."""
        self._algorithm, self._spec = algorithm, algorithm.spec
        programs = algorithm.programs
        self._buffers = [BufferMap(self._spec, rank, program.scratch_chunks) for rank, program in enumerate(programs)]
        self._values = [[0] * buffers.size for buffers in self._buffers]
        self._messages: defaultdict[tuple[int, int, int], deque[list[int]]] = defaultdict(deque)
        for rank, buffers in enumerate(self._buffers):
            first = buffers.start["i"]
            self._values[rank][first : first + buffers.lengths["i"]] = self._spec.precondition(rank)

    def run(self, ref: StepRef) -> None:
        """Execute one step."""
        lane = self._algorithm.programs[ref.rank].lanes[ref.lane]
        step = lane.steps[ref.step]
        if step.kind == "nop":
            return
        if step.receives and lane.receive is not None:
            values = self._messages[lane.receive, ref.rank, lane.channel].popleft()
            if step.reduces:
                values = self._sum(ref, step, values, self._read(ref, step.source, step.count))
        else:
            values = self._read(ref, step.source, step.count)
            if step.reduces:
                values = self._sum(ref, step, values, self._read(ref, step.target, step.count))
        if step.writes:
            cells = self._buffers[ref.rank].cells(step.writes, step.count)
            self._values[ref.rank][cells.start : cells.stop] = values
        if step.sends and lane.send is not None:
            self._messages[ref.rank, lane.send, lane.channel].append(values)

    def _read(self, ref: StepRef, place: Place | None, count: int) -> list[int]:
        assert place is not None
        buffers = self._buffers[ref.rank]
        cells = buffers.cells(place, count)
        values = self._values[ref.rank][cells.start : cells.stop]
        if 0 in values:
            name = buffers.name(cells[values.index(0)])
            remedy = "Write it first, or read another chunk."
            raise error_at(self._algorithm, ref, name, "initialised data to read", "an uninitialised chunk", remedy)
        return values

    def _sum(self, ref: StepRef, step: Step, left: list[int], right: list[int]) -> list[int]:
        ranks = self._spec.ranks
        for position, (one, other) in enumerate(zip(left, right, strict=True)):
            if one >> ranks != other >> ranks or one & other & (1 << ranks) - 1:
                raise self._wrong_sum(ref, step, position, one, other)
        return [one | other for one, other in zip(left, right, strict=True)]

    def _wrong_sum(self, ref: StepRef, step: Step, position: int, one: int, other: int) -> ScheduleError:
        place = step.writes or step.source
        assert place is not None
        buffers = self._buffers[ref.rank]
        name = buffers.name(buffers.cells(place, step.count)[position])
        expected = "two partial sums of the same chunk from disjoint ranks"
        got = f"{_describe_value(self._spec, one)} and {_describe_value(self._spec, other)}"
        return error_at(self._algorithm, ref, name, expected, got, "Add each rank's contribution exactly once.")

    def check_output(self, rank: int) -> None:
        """Compare a rank's output with the postcondition."""
        buffers = self._buffers[rank]
        for chunk, required in enumerate(self._spec.postcondition(rank)):
            value = self._values[rank][buffers.start["o"] + chunk]
            if value != required:
                expected, got = (_describe_value(self._spec, one) for one in (required, value))
                remedy = "Trace the chunk through the schedule to the missing or wrong step."
                raise error_at(self._algorithm, rank, f"output chunk {chunk}", expected, got, remedy)


def _describe_value(spec: CollectiveSpec, value: int) -> str:
    chunk, ranks = spec.decompose(value)
    if not ranks:
        return "an uninitialised chunk"
    many = len(ranks) > 1
    return f"{'the sum of ' * many}chunk {chunk} of rank{'s' * many} {format_ranks(ranks)}"
