"""Checks the structure of an algorithm: complete, consistent, with valid references, and writing only where it may.

The errors of all checks are made here: they name algorithm, rank, lane, step and chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule.ir import BUFFER_NAMES, COLLECTIVES, HAS_SOURCE, HAS_TARGET, KINDS, BufferMap

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpi_gpucomp.schedule.ir import Algorithm, Lane, Place, Step

__all__ = ["StepRef", "check_structure", "describe", "error_at", "format_ranks", "step_at"]

MAX_CHUNKS = 1 << 20
"""Far more than any algorithm needs, and few enough to check."""
MAX_TOTAL_CHUNKS = 1 << 22
"""Of all ranks, in scratch memory too: a check replays each of them."""


def check_structure(algorithm: Algorithm) -> None:
    """Raise ScheduleError unless the algorithm is well formed."""
    _check_header(algorithm)
    for rank, program in enumerate(algorithm.programs):
        buffers = BufferMap(algorithm.spec, rank, program.scratch_chunks)
        _check_lengths(algorithm, rank, buffers)
        _check_connections(algorithm, rank)
        for number, lane in enumerate(program.lanes):
            for index, step in enumerate(lane.steps):
                _check_step(algorithm, StepRef(rank, number, index), lane, step, buffers)


def _check_header(algorithm: Algorithm) -> None:
    kind = COLLECTIVES.get(algorithm.collective)
    ranks, chunks, root = algorithm.ranks, algorithm.chunks, algorithm.root
    if kind is None:
        expected, got = f"one of {', '.join(COLLECTIVES)}", algorithm.collective
        raise error_at(algorithm, None, "collective", expected, got, "Name one of these.")
    if ranks < 1 or len(algorithm.programs) != ranks:
        expected, got = f"one program for each of {ranks} ranks", f"{len(algorithm.programs)} programs"
        raise error_at(algorithm, None, "ranks", expected, got, "Give every rank a program.")
    if not 1 <= chunks <= MAX_CHUNKS or (kind.blocks and chunks % ranks):
        expected = f"1 to {MAX_CHUNKS}" + (f", and a multiple of the {ranks} ranks" if kind.blocks else "")
        raise error_at(algorithm, None, "chunks", expected, str(chunks), "Use another number of chunks.")
    total = sum(chunks + min(program.scratch_chunks, MAX_CHUNKS) for program in algorithm.programs)
    if total > MAX_TOTAL_CHUNKS:
        expected, remedy = f"at most {MAX_TOTAL_CHUNKS} on all ranks, with scratch memory", "Use fewer chunks."
        raise error_at(algorithm, None, "chunks", expected, str(total), remedy)
    if root is not None and not 0 <= root < ranks:
        raise error_at(algorithm, None, "root", f"a rank from 0 to {ranks - 1}", str(root), "Use a valid rank.")


def _check_lengths(algorithm: Algorithm, rank: int, buffers: BufferMap) -> None:
    """Compare the buffer lengths of a program with its collective's; 0 means unspecified."""
    program = algorithm.programs[rank]
    for buffer, stated in (("i", program.input_chunks), ("o", program.output_chunks)):
        length = buffers.lengths[buffer]
        if stated < 0 or (stated and length and stated != length):
            expected, remedy = f"{length} chunks, as in {algorithm.collective}", "Correct the length."
            raise error_at(algorithm, rank, BUFFER_NAMES[buffer], expected, str(stated), remedy)
    if not 0 <= program.scratch_chunks <= MAX_CHUNKS:
        got = str(program.scratch_chunks)
        raise error_at(algorithm, rank, "scratch", f"0 to {MAX_CHUNKS} chunks", got, "Correct the length.")


def _check_connections(algorithm: Algorithm, rank: int) -> None:
    owner: dict[tuple[str, int, int], int] = {}
    for number, lane in enumerate(algorithm.programs[rank].lanes):
        for action, peer in (("sends to", lane.send), ("receives from", lane.receive)):
            if peer is None:
                continue
            if not 0 <= peer < algorithm.ranks or peer == rank:
                expected = f"another rank from 0 to {algorithm.ranks - 1}"
                raise error_at(algorithm, rank, f"lane {number}: {action}", expected, str(peer), "Use a valid rank.")
            first = owner.setdefault((action, peer, lane.channel), number)
            if first != number:
                field = f"lane {number}: {action} rank {peer} on channel {lane.channel}"
                remedy = "Merge the lanes, or use another channel."
                raise error_at(algorithm, rank, field, "one lane", f"lane {first} as well", remedy)


def _check_step(algorithm: Algorithm, ref: StepRef, lane: Lane, step: Step, buffers: BufferMap) -> None:
    if step.kind not in KINDS:
        raise error_at(algorithm, ref, "kind", f"one of {', '.join(KINDS)}", step.kind, "Use one of these.")
    if step.count < 1:
        raise error_at(algorithm, ref, "count", "1 or more", str(step.count), "Remove the step.")
    for peer, used, action in ((lane.send, step.sends, "send to"), (lane.receive, step.receives, "receive from")):
        if used and peer is None:
            raise error_at(algorithm, ref, "", f"a lane with a peer to {action}", "none", "Give the lane a peer.")
    if step.kind in HAS_SOURCE:
        _check_place(algorithm, ref, "source", step.source, buffers)
    if step.kind in HAS_TARGET:
        _check_place(algorithm, ref, "target", step.target, buffers)
        _check_writable(algorithm, ref, step, buffers)
    _check_after(algorithm, ref, step)


def _check_place(algorithm: Algorithm, ref: StepRef, role: str, place: Place | None, buffers: BufferMap) -> None:
    if place is None or place.buffer not in BUFFER_NAMES:
        raise error_at(algorithm, ref, role, "a chunk of i, o or s", str(place), "Give a buffer and an offset.")
    count = step_at(algorithm, ref).count
    if not buffers.contains(place, count):
        length = buffers.lengths[place.buffer]
        got = f"{place}" if count == 1 else f"{count} chunks from {place} on"
        expected = f"chunks inside the {BUFFER_NAMES[place.buffer]}, which has {length}"
        raise error_at(algorithm, ref, role, expected, got, "Correct the offset or the count, or enlarge the scratch.")


def _check_writable(algorithm: Algorithm, ref: StepRef, step: Step, buffers: BufferMap) -> None:
    assert step.target is not None
    for cell in buffers.cells(step.target, step.count):
        if not buffers.writable(cell):
            raise error_at(
                algorithm,
                ref,
                "target",
                "the output or scratch",
                f"{buffers.name(cell)}, which is read-only",
                "Write elsewhere, or declare the algorithm in place.",
            )


def _check_after(algorithm: Algorithm, ref: StepRef, step: Step) -> None:
    lanes = algorithm.programs[ref.rank].lanes
    for lane, index in step.after:
        if not (0 <= lane < len(lanes) and 0 <= index < len(lanes[lane].steps)):
            got = f"lane {lane}, step {index}"
            raise error_at(algorithm, ref, "after", "an existing step of this rank", got, "Correct the dependency.")


class StepRef(NamedTuple):
    """The position of a step in an algorithm."""

    rank: int
    lane: int
    step: int


def step_at(algorithm: Algorithm, ref: StepRef) -> Step:
    """Return the step at a position."""
    return algorithm.programs[ref.rank].lanes[ref.lane].steps[ref.step]


def describe(algorithm: Algorithm, ref: StepRef) -> str:
    """Describe a step within its rank: its position, kind and peers."""
    lane = algorithm.programs[ref.rank].lanes[ref.lane]
    step = lane.steps[ref.step]
    sender = f" from {lane.receive}" if step.receives else ""
    receiver = f" to {lane.send}" if step.sends else ""
    return f"lane {ref.lane}, step {ref.step} ({step.kind}{sender}{receiver})"


def error_at(
    algorithm: Algorithm, at: StepRef | int | None, field: str, expected: str, got: str, remedy: str
) -> ScheduleError:
    """Return the error for a step, a rank or the whole algorithm; `field` names a part of it, or is empty."""
    rank = at.rank if isinstance(at, StepRef) else at
    where = describe(algorithm, at) if isinstance(at, StepRef) else ""
    topic = ": ".join(filter(None, (f"algorithm {algorithm.name}", where, field)))
    return ScheduleError(topic, expected=expected, got=got, remedy=remedy, rank=rank)


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks with runs of three or more shortened: 0..3, 7."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
