"""Finds races: two steps of a rank that touch one chunk, one of them writing, and no order between them.

Order comes from the lane, from `after`, and from messages: who has an answer has been heard. A message proves that its
sender has begun, and that it has read what it sent, but not that it has stored anything: bytes may travel on first.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.verify.diagnostics import StepRef, describe, fault
from mpi_gpucomp.schedule.verify.result import Memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpi_gpucomp.schedule.ir import Algorithm, Step
    from mpi_gpucomp.schedule.verify.deadlock import Pairs

__all__ = ["check_races"]


def check_races(algorithm: Algorithm, order: Sequence[StepRef], pairs: Pairs) -> None:
    """Raise ScheduleError where the outcome depends on which of two steps is first; `order` is one that can run."""
    own: list[list[StepRef]] = [[] for _ in algorithm.programs]
    for spot in order:
        own[spot.rank].append(spot)
    for rank, spots in enumerate(own):
        memory = Memory(algorithm.spec, rank, algorithm.programs[rank].scratch_chunks)
        number = {spot: position for position, spot in enumerate(spots)}
        behind = _behind(algorithm, number)
        for cell, earlier, later in _conflicts(algorithm, spots, memory):
            if not behind[later] >> number[earlier] & 1 and not _heard_of(algorithm, pairs, earlier, later):
                expected = f"an order between it and {describe(algorithm, earlier)}"
                remedy = "Let one of them come after the other."
                raise fault(algorithm, later, memory.name(cell), expected, "none, and one of them writes", remedy)


def _step(algorithm: Algorithm, spot: StepRef) -> Step:
    return algorithm.programs[spot.rank].lanes[spot.lane].steps[spot.step]


def _behind(algorithm: Algorithm, number: dict[StepRef, int]) -> dict[StepRef, int]:
    """Return for each step of a rank, as bits, the steps of that rank which its lane and `after` put before it."""
    behind: dict[StepRef, int] = {}
    for spot, bit in number.items():
        found = 1 << bit
        for other in _local(algorithm, spot):
            found |= behind[other]
        behind[spot] = found
    return behind


def _local(algorithm: Algorithm, spot: StepRef) -> Iterator[StepRef]:
    if spot.step:
        yield spot._replace(step=spot.step - 1)
    for other in _step(algorithm, spot).after:
        yield StepRef(spot.rank, *other)


def _conflicts(
    algorithm: Algorithm, spots: Sequence[StepRef], memory: Memory
) -> Iterator[tuple[int, StepRef, StepRef]]:
    """Yield cell, earlier and later step of neighbouring accesses that must not change places.

    Neighbours are enough: if each of them is in order, so are all.
    """
    writer: dict[int, StepRef] = {}
    readers: defaultdict[int, list[StepRef]] = defaultdict(list)
    for spot in spots:
        step = _step(algorithm, spot)
        for place in step.reads:
            for cell in memory.cells(place, step.count):
                if cell in writer:
                    yield cell, writer[cell], spot
                readers[cell].append(spot)
        for cell in memory.cells(step.writes, step.count) if step.writes else ():
            for earlier in (*readers.pop(cell, ()), *filter(None, [writer.get(cell)])):
                if earlier != spot:
                    yield cell, earlier, spot
            writer[cell] = spot


def _heard_of(algorithm: Algorithm, pairs: Pairs, earlier: StepRef, later: StepRef) -> bool:
    """Say whether a step had to be over, in any rank's order of events, before a later one could begin."""
    seen = {later}
    todo = [later]
    while todo:
        spot = todo.pop()
        before = list(_local(algorithm, spot))
        send = pairs.send_of.get(spot)
        if send is not None and (send != earlier or _step(algorithm, send).kind in ("s", "rrs")):
            before.append(send)
        if earlier in before:
            return True
        fresh = set(before) - seen
        seen |= fresh
        todo.extend(fresh)
    return False
