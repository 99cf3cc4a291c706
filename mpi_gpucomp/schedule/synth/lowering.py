"""Lowers routed and ordered chunks to a schedule: assigns places, adds transfers in order, reverses reductions."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.builder import ScheduleBuilder, i, o, s
from mpi_gpucomp.schedule.synth.problem import RAW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.schedule.ir import Place
    from mpi_gpucomp.schedule.synth.contiguity import TimedHop
    from mpi_gpucomp.schedule.synth.problem import Chunk, Problem

    Messages = Sequence[Sequence[TimedHop]]

__all__ = ["CHANNELS_EACH", "add_copies", "add_reductions", "copy_own_blocks"]

FORMS = 2
CHANNELS_EACH = 2
"""Channels of a stage with separate lanes.

A lane that receives and forwards a chunk cannot receive the next one until it has sent it. If messages leave on another
channel than they arrive on, receives and sends are in separate lanes.
"""


class _Places:
    """The place of each chunk on each rank: in scratch on a rank that only forwards it."""

    def __init__(self, builder: ScheduleBuilder, problem: Problem) -> None:
        self._builder, self._problem = builder, problem
        self._each = problem.sketch.chunkup
        self._scratch: defaultdict[int, dict[int, int]] = defaultdict(dict)

    def of(self, number: int, rank: int) -> Place:
        """Return the place of a chunk on a rank."""
        chunk = self._problem.chunks[number]
        return self._own(chunk, rank) or self.scratch(number, rank)

    def scratch(self, number: int, rank: int) -> Place:
        """Return the place of a chunk in scratch."""
        known = self._scratch[rank]
        return s(known.setdefault(number, len(known)))

    def _own(self, chunk: Chunk, rank: int) -> Place | None:
        each, (source, part, to) = self._each, chunk
        block = source * each + part
        match self._builder.collective:
            case "broadcast" | "reduce":
                return o(part)
            case "allreduce":
                return o(block)
            case "allgather":
                return i(part) if rank == source else o(block)
            case "gather":
                return i(part) if rank == source else o(block) if rank in to else None
            case "scatter":
                return i(min(to) * each + part) if rank == source else o(part) if rank in to else None
            case _:
                return i(min(to) * each + part) if rank == source else o(block) if rank in to else None


def copy_own_blocks(builder: ScheduleBuilder, each: int) -> None:
    """Copy the blocks that do not leave their rank."""
    for rank in range(builder.ranks):
        if builder.collective in ("allgather", "alltoall") or (builder.collective == "gather" and rank == builder.root):
            source = i(rank * each) if builder.collective == "alltoall" else i(0)
            builder.local_copy(rank, source, o(rank * each), each)
        elif builder.collective == "scatter" and rank == builder.root:
            builder.local_copy(rank, i(rank * each), o(0), each)


def _depths(messages: Messages) -> dict[tuple[int, int], int]:
    """Return the number of hops that bring each chunk to each rank."""
    depths: dict[tuple[int, int], int] = {}
    for one in sorted((one for message in messages for one in message), key=lambda one: one.start):
        chunk, sender, receiver, _ = one.hop
        depths[chunk, receiver] = depths.get((chunk, sender), 0) + 1
    return depths


def add_copies(builder: ScheduleBuilder, problem: Problem, messages: Messages, stage: int, *, separate: bool) -> None:
    """Add the messages of a routing; `separate` puts receives and sends in separate lanes."""
    places, depths = _Places(builder, problem), _depths(messages)
    for message in messages:
        for first, count in _runs(places, message):
            hop = first.hop
            source, target = places.of(hop.chunk, hop.sender), places.of(hop.chunk, hop.receiver)
            channel = _channel(stage, depths[hop.chunk, hop.receiver], separate)
            if len(problem.codecs) > 1:
                # Each form has its own channels, so that a frame of one form is not forwarded as the other.
                channel = FORMS * channel + hop.form
                if hop.form == RAW:
                    builder.raw_channels.add(channel)
            builder.copy(hop.sender, source, hop.receiver, target, count, channel=channel)


def _runs(places: _Places, message: Sequence[TimedHop]) -> list[tuple[TimedHop, int]]:
    """Split a message into runs of chunks that are consecutive in memory at both ends."""
    runs: list[tuple[TimedHop, int]] = []
    for one in message:
        hop = one.hop
        if runs and runs[-1][0].hop.form == hop.form:
            head, count = runs[-1]
            ends = [(places.of(head.hop.chunk, rank), places.of(hop.chunk, rank)) for rank in hop[1:3]]
            if all((a.buffer, a.offset + count) == (b.buffer, b.offset) for a, b in ends):
                runs[-1] = head, count + 1
                continue
        runs.append((one, 1))
    return runs


def _channel(stage: int, depth: int, separate: bool) -> int:
    return CHANNELS_EACH * stage + depth % CHANNELS_EACH if separate else stage


def add_reductions(
    builder: ScheduleBuilder, problem: Problem, messages: Messages, stage: int, *, separate: bool
) -> None:
    """Add the messages of a routing in reverse order and direction, as reductions."""
    places, depths = _Places(builder, problem), _depths(messages)
    sums: dict[tuple[int, int], Place] = {}
    for message in sorted(messages, key=lambda message: -message[-1].end):
        for one in message:
            number, receiver, sender, _ = one.hop
            chunk = problem.chunks[number]
            initial = i(chunk.source * problem.sketch.chunkup + chunk.part) if _by_block(builder) else i(chunk.part)
            if builder.collective == "allreduce":
                target = places.of(number, receiver)
            elif receiver == chunk.source:
                target = o(chunk.part)
            else:
                target = places.scratch(number, receiver)
            source, operand = sums.get((number, sender), initial), sums.get((number, receiver), initial)
            channel = _channel(stage, depths[number, sender], separate)
            builder.reduce(sender, source, receiver, target, operand=operand, channel=channel)
            sums[number, receiver] = target


def _by_block(builder: ScheduleBuilder) -> bool:
    return builder.collective in ("reduce_scatter", "allreduce")
