"""What the core executes: a rank's program of a schedule as a flat table, and the caller's buffers in chunks.

In the table a step becomes one entry for each of its chunks. The entry also says what the data flow of the program
allows: which sends share a frame, what can be sent or received in place, and which values a lossy codec may settle.

A vector, or each rank's block of it, is divided into chunks of the same length. A loop of the schedule covers k chunks
of a block, and loop `l` starts at chunk `l * k`. The last chunks of a block may be shorter, or empty. The core computes
where each chunk is.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpi_gpucomp.core.library import core
from mpi_gpucomp.engine.agreement import CHANNELS
from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule.dataflow import ChunkValue, dataflow
from mpi_gpucomp.schedule.ir import COLLECTIVES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.device.buffer import Buffer
    from mpi_gpucomp.schedule.dataflow import Dataflow
    from mpi_gpucomp.schedule.ir import Algorithm, CollectiveSpec, Place, Step

__all__ = ["Blocks", "CompiledProgram", "Layout", "compile_program"]

KINDS = {kind: number for number, kind in enumerate(("s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop"))}
BUFFERS = {"i": 0, "o": 1, "s": 2}
CACHE_SIZE = 256


class CompiledProgram:
    """A compiled program."""

    def __init__(self, algorithm: Algorithm, rank: int) -> None:
        """Compile one rank's program."""
        _check_channels(algorithm, rank)
        self.algorithm = algorithm
        self.lanes = algorithm.programs[rank].lanes
        numbers = _table(algorithm, rank)
        self.handle = core().gc_program_new(
            (core().gc_program_new.argtypes[0]._type_ * len(numbers))(*numbers), len(numbers)
        )
        assert self.handle, "the table has the layout of Program::parse"

    def __del__(self) -> None:
        """Free the table."""
        if getattr(self, "handle", None):
            core().gc_program_free(self.handle)


_cache: dict[tuple[int, int], CompiledProgram] = {}
"""Keyed by identity; a program keeps its algorithm alive. Comparing two algorithms takes longer than compiling one."""


def compile_program(algorithm: Algorithm, rank: int) -> CompiledProgram:
    """Return the compiled program of a rank, from a cache if it is there."""
    key = id(algorithm), rank
    if key not in _cache:
        if len(_cache) >= CACHE_SIZE:
            _cache.clear()
        _cache[key] = CompiledProgram(algorithm, rank)
    return _cache[key]


def _table(algorithm: Algorithm, rank: int) -> array[int]:
    program, flow = algorithm.programs[rank], dataflow(algorithm, rank)
    receives_raw = _receives_raw(algorithm, rank)
    values: dict[ChunkValue, int] = {}
    numbers = array("q")
    for number, lane in enumerate(program.lanes):
        numbers.extend(-1 if peer is None else peer for peer in (lane.send, lane.receive))
        numbers.extend((lane.channel, lane.raw, receives_raw[number], flow.shared_frames(number), len(lane.steps)))
        numbers.append(sum(max(1, step.count) for step in lane.steps))
        forms = lane.raw, receives_raw[number]
        for index, step in enumerate(lane.steps):
            for chunk in range(max(1, step.count)):
                numbers.extend(_entry(step, (number, index), chunk, flow, values, forms))
    return array("q", (len(program.lanes), max(1, len(values)))) + numbers


def _entry(
    step: Step,
    key: tuple[int, int],
    chunk: int,
    flow: Dataflow,
    values: dict[ChunkValue, int],
    forms: tuple[bool, bool],
) -> array[int]:
    """Return the entry of one chunk of a step; `forms` is True where its lane sends, and receives, raw chunks."""
    raw, received_raw = forms
    kind = step.kind if step.count else "nop"
    entry = array("q", (KINDS[kind], chunk == 0, chunk >= step.count - 1))
    entry.extend((*_place(step.source, chunk), *_place(step.target, chunk)))
    read = flow.read[key][chunk] if kind == "s" else None
    if read is None:
        entry.extend((-1, 0, False, False, False))
    else:
        number = values.setdefault(read, len(values))
        entry.extend((number, read.sends_as(raw), read.initial, read.initial and read.persists, read.final))
    # What a reduction sends and does not store is no value that others could send.
    written = flow.written[key][chunk] if kind in ("r", "rcs", "rrcs", "rrc") and key in flow.written else None
    if written is None:
        entry.extend((-1, 0, False, False, False))
    else:
        shares_raw = received_raw if kind in ("r", "rcs") else raw
        shares = written.sends_as(shares_raw) if kind != "rrc" else 0
        lands = kind in ("r", "rcs") and step.target is not None and step.target.buffer != "s"
        zero_copy = lands and written.first_write and written.persists
        number = values.setdefault(written, len(values))
        entry.extend((number, shares, shares_raw, written.final, zero_copy))
    after = step.after if chunk == 0 else ()
    entry.append(len(after))
    for lane, at in after:
        entry.extend((lane, at + 1))
    return entry


def _place(place: Place | None, chunk: int) -> tuple[int, int]:
    return (-1, 0) if place is None else (BUFFERS[place.buffer], place.offset + chunk)


def _receives_raw(algorithm: Algorithm, rank: int) -> list[bool]:
    """Return for each lane whether it receives raw chunks."""
    raw = {
        (sender, lane.channel)
        for sender, program in enumerate(algorithm.programs)
        for lane in program.lanes
        if lane.raw and lane.send == rank
    }
    return [(lane.receive, lane.channel) in raw for lane in algorithm.programs[rank].lanes]


def _check_channels(algorithm: Algorithm, rank: int) -> None:
    channels = 1 + max((lane.channel for lane in algorithm.programs[rank].lanes), default=0)
    if channels > CHANNELS:
        raise ScheduleError(
            f"algorithm {algorithm.name}",
            expected=f"at most {CHANNELS} channels",
            got=f"{channels}",
            remedy="Use one channel for lanes to different peers.",
            rank=rank,
        )


@dataclass(frozen=True)
class Blocks:
    """A caller's buffer as blocks: first element and length of each."""

    buffer: Buffer
    starts: Sequence[int]
    counts: Sequence[int]

    @classmethod
    def even(cls, buffer: Buffer, blocks: int) -> Blocks:
        """Divide a buffer into blocks of the same length."""
        count = buffer.count // blocks
        return cls(buffer, [block * count for block in range(blocks)], [count] * blocks)


class Layout:
    """The input and output of one rank, in chunks of `chunk` elements."""

    def __init__(self, goal: CollectiveSpec, sent: Blocks | None, received: Blocks | None, chunk: int) -> None:
        """Map a goal's buffers to the caller's."""
        self.chunk = chunk
        self.per_block = goal.block if COLLECTIVES[goal.collective].blocks else goal.chunks
        self.input, self.output = sent, received
        self.longest = max((n for blocks in (sent, received) if blocks for n in blocks.counts), default=0)
        """The length of the longest block that this rank knows of."""

    def lengths(self) -> set[int]:
        """Return the lengths of the chunks that are not empty."""
        counts = {count for blocks in (self.input, self.output) if blocks for count in blocks.counts}
        full = {self.chunk for count in counts if count >= self.chunk}
        return full | {count % self.chunk for count in counts if count % self.chunk}
