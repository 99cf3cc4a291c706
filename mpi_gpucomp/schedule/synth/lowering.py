"""Makes a schedule of routed and ordered chunks: places for them, transfers in order, reductions backwards."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.builder import ScheduleBuilder, i, o, s
from mpi_gpucomp.schedule.synth.problem import PLAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.schedule.ir import Place
    from mpi_gpucomp.schedule.synth.contiguity import Timed
    from mpi_gpucomp.schedule.synth.problem import Chunk, Problem

    Messages = Sequence[Sequence[Timed]]

__all__ = ["CHANNELS_EACH", "add_copies", "add_reductions", "keep_own"]

FORMS = 2
CHANNELS_EACH = 2
"""Channels of a stage whose lanes are kept apart.

A chunk that is received and sent on in one lane holds up the next one that comes there until it is sent. If messages
leave on another channel than they came on, receiving and sending are lanes of their own.
"""


class _Places:
    """Where a chunk of a collective lies on each rank; on one that only passes it on, in scratch."""

    def __init__(self, plan: ScheduleBuilder, problem: Problem) -> None:
        self._plan, self._problem = plan, problem
        self._each = problem.sketch.chunkup
        self._scratch: defaultdict[int, dict[int, int]] = defaultdict(dict)

    def of(self, number: int, rank: int) -> Place:
        """Return the place of a chunk on a rank."""
        chunk = self._problem.chunks[number]
        return self._own(chunk, rank) or self.scratch(number, rank)

    def scratch(self, number: int, rank: int) -> Place:
        """Return the place of a chunk in scratch, the same every time."""
        known = self._scratch[rank]
        return s(known.setdefault(number, len(known)))

    def _own(self, chunk: Chunk, rank: int) -> Place | None:
        each, (source, part, to) = self._each, chunk
        block = source * each + part
        match self._plan.collective:
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


def keep_own(plan: ScheduleBuilder, each: int) -> None:
    """Let every rank keep what is its own from the start."""
    for rank in range(plan.ranks):
        if plan.collective in ("allgather", "alltoall") or (plan.collective == "gather" and rank == plan.root):
            source = i(rank * each) if plan.collective == "alltoall" else i(0)
            plan.local_copy(rank, source, o(rank * each), each)
        elif plan.collective == "scatter" and rank == plan.root:
            plan.local_copy(rank, i(rank * each), o(0), each)


def _depths(messages: Messages) -> dict[tuple[int, int], int]:
    """Return how many hops each chunk has behind it on each rank."""
    depths: dict[tuple[int, int], int] = {}
    for one in sorted((one for message in messages for one in message), key=lambda one: one.start):
        chunk, sender, receiver, _ = one.hop
        depths[chunk, receiver] = depths.get((chunk, sender), 0) + 1
    return depths


def add_copies(plan: ScheduleBuilder, problem: Problem, messages: Messages, stage: int, *, apart: bool) -> None:
    """Add the messages of a routing that copies; `apart` keeps receiving and sending in lanes of their own."""
    places, depths = _Places(plan, problem), _depths(messages)
    for message in messages:
        for first, count in _runs(places, message):
            hop = first.hop
            source, target = places.of(hop.chunk, hop.sender), places.of(hop.chunk, hop.receiver)
            channel = _channel(stage, depths[hop.chunk, hop.receiver], apart)
            if len(problem.codings) > 1:
                # Each form has channels of its own, so that what comes in one is not passed on for the other.
                channel = FORMS * channel + hop.form
                if hop.form == PLAIN:
                    plan.raw_channels.add(channel)
            plan.copy(hop.sender, source, hop.receiver, target, count, channel=channel)


def _runs(places: _Places, message: Sequence[Timed]) -> list[tuple[Timed, int]]:
    """Cut a message where its chunks do not lie one behind the other at both ends."""
    runs: list[tuple[Timed, int]] = []
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


def _channel(stage: int, depth: int, apart: bool) -> int:
    return CHANNELS_EACH * stage + depth % CHANNELS_EACH if apart else stage


def add_reductions(plan: ScheduleBuilder, problem: Problem, messages: Messages, stage: int, *, apart: bool) -> None:
    """Add the messages of a routing backwards: the last to be sent is the first, and what met is added up."""
    places, depths = _Places(plan, problem), _depths(messages)
    grown: dict[tuple[int, int], Place] = {}
    for message in sorted(messages, key=lambda message: -message[-1].end):
        for one in message:
            number, receiver, sender, _ = one.hop
            chunk = problem.chunks[number]
            begins = i(chunk.source * problem.sketch.chunkup + chunk.part) if _by_block(plan) else i(chunk.part)
            if plan.collective == "allreduce":
                home = places.of(number, receiver)
            elif receiver == chunk.source:
                home = o(chunk.part)
            else:
                home = places.scratch(number, receiver)
            source, operand = grown.get((number, sender), begins), grown.get((number, receiver), begins)
            channel = _channel(stage, depths[number, sender], apart)
            plan.reduce(sender, source, receiver, home, operand=operand, channel=channel)
            grown[number, receiver] = home


def _by_block(plan: ScheduleBuilder) -> bool:
    return plan.collective in ("reduce_scatter", "allreduce")
