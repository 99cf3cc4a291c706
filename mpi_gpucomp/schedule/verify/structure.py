"""Checks the form of an algorithm: that every part is there, names what exists, and writes where it may."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.ir import COLLECTIVES, HAS_SOURCE, HAS_TARGET, KINDS
from mpi_gpucomp.schedule.verify.diagnostics import StepRef, fault
from mpi_gpucomp.schedule.verify.result import NAMES, Memory

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm, Lane, Place, Step

__all__ = ["check_form"]

MOST_CHUNKS = 1 << 20
"""Far more than any algorithm needs, and few enough to check."""


def check_form(algorithm: Algorithm) -> None:
    """Raise ScheduleError unless the algorithm is well formed."""
    _check_head(algorithm)
    for rank, program in enumerate(algorithm.programs):
        memory = Memory(algorithm.spec, rank, program.scratch_chunks)
        _check_lengths(algorithm, rank, memory)
        _check_connections(algorithm, rank)
        for number, lane in enumerate(program.lanes):
            for index, step in enumerate(lane.steps):
                _check_step(algorithm, StepRef(rank, number, index), lane, step, memory)


def _check_head(algorithm: Algorithm) -> None:
    kind = COLLECTIVES.get(algorithm.collective)
    ranks, chunks, root = algorithm.ranks, algorithm.chunks, algorithm.root
    if kind is None:
        expected, got = f"one of {', '.join(COLLECTIVES)}", algorithm.collective
        raise fault(algorithm, None, "collective", expected, got, "Name the collective that it does.")
    if ranks < 1 or len(algorithm.programs) != ranks:
        got = f"{len(algorithm.programs)} programs"
        raise fault(algorithm, None, "ranks", f"one program for each of {ranks} ranks", got, "Write one for each rank.")
    if not 1 <= chunks <= MOST_CHUNKS or (kind.blocks and chunks % ranks):
        expected = f"1 to {MOST_CHUNKS}" + (f", and a multiple of the {ranks} ranks" if kind.blocks else "")
        raise fault(algorithm, None, "chunks", expected, str(chunks), "Cut the data into another number of chunks.")
    if root is not None and not 0 <= root < ranks:
        raise fault(algorithm, None, "root", f"a rank from 0 to {ranks - 1}", str(root), "Name a rank that there is.")


def _check_lengths(algorithm: Algorithm, rank: int, memory: Memory) -> None:
    """Compare the lengths that a program states with its collective's; 0 leaves them to it."""
    program = algorithm.programs[rank]
    for buffer, stated in (("i", program.input_chunks), ("o", program.output_chunks)):
        length = memory.lengths[buffer]
        if stated < 0 or (stated and length and stated != length):
            expected = f"{length} chunks, as {algorithm.collective} has"
            raise fault(algorithm, rank, NAMES[buffer], expected, str(stated), "Correct the length, or the chunks.")
    if not 0 <= program.scratch_chunks <= MOST_CHUNKS:
        got = str(program.scratch_chunks)
        raise fault(algorithm, rank, "scratch", f"0 to {MOST_CHUNKS} chunks", got, "Correct the length.")


def _check_connections(algorithm: Algorithm, rank: int) -> None:
    owner: dict[tuple[str, int, int], int] = {}
    for number, lane in enumerate(algorithm.programs[rank].lanes):
        for way, peer in (("sends to", lane.send), ("receives from", lane.receive)):
            if peer is None:
                continue
            if not 0 <= peer < algorithm.ranks or peer == rank:
                expected = f"another rank from 0 to {algorithm.ranks - 1}"
                raise fault(algorithm, rank, f"lane {number}: {way}", expected, str(peer), "Name a rank that there is.")
            first = owner.setdefault((way, peer, lane.channel), number)
            if first != number:
                what = f"lane {number}: {way} rank {peer} on channel {lane.channel}"
                got = f"lane {first} that does so too"
                raise fault(algorithm, rank, what, "to be the only one", got, "Join the lanes, or use another channel.")


def _check_step(algorithm: Algorithm, spot: StepRef, lane: Lane, step: Step, memory: Memory) -> None:
    if step.kind not in KINDS:
        raise fault(algorithm, spot, "kind", f"one of {', '.join(KINDS)}", step.kind, "Choose one of these.")
    if step.count < 1:
        raise fault(algorithm, spot, "count", "one chunk at least", str(step.count), "Leave the step out.")
    for peer, used, way in ((lane.send, step.sends, "send to"), (lane.receive, step.receives, "receive from")):
        if used and peer is None:
            raise fault(algorithm, spot, "", f"a lane with a rank to {way}", "none", "Give the lane a peer.")
    if step.kind in HAS_SOURCE:
        _check_place(algorithm, spot, "source", step.source, memory)
    if step.kind in HAS_TARGET:
        _check_place(algorithm, spot, "target", step.target, memory)
        _check_may_write(algorithm, spot, step, memory)
    _check_after(algorithm, spot, step)


def _check_place(algorithm: Algorithm, spot: StepRef, role: str, place: Place | None, memory: Memory) -> None:
    if place is None or place.buffer not in NAMES:
        raise fault(algorithm, spot, role, "a place in i, o or s", str(place), "Name a buffer and an offset.")
    count = algorithm.programs[spot.rank].lanes[spot.lane].steps[spot.step].count
    if not memory.holds(place, count):
        length = memory.lengths[place.buffer]
        got = f"{place}" if count == 1 else f"{count} chunks from {place} on"
        expected = f"chunks of the {NAMES[place.buffer]}, which has {length} here"
        raise fault(algorithm, spot, role, expected, got, "Correct the offset or the count, or lengthen the scratch.")


def _check_may_write(algorithm: Algorithm, spot: StepRef, step: Step, memory: Memory) -> None:
    assert step.target is not None
    for cell in memory.cells(step.target, step.count):
        if not memory.may_write(cell):
            raise fault(
                algorithm,
                spot,
                "target",
                "the output or scratch",
                f"{memory.name(cell)}, which the caller keeps",
                "Write elsewhere, or declare the algorithm to be in place.",
            )


def _check_after(algorithm: Algorithm, spot: StepRef, step: Step) -> None:
    lanes = algorithm.programs[spot.rank].lanes
    for lane, index in step.after:
        if not (0 <= lane < len(lanes) and 0 <= index < len(lanes[lane].steps)):
            got = f"lane {lane}, step {index}"
            raise fault(algorithm, spot, "after", "a step that this rank has", got, "Correct the dependency.")
