"""Finds races: two unordered steps of a rank that access the same chunk, at least one of them writing.

Order comes from the lane, from `after`, and from messages: a step that depends on a reply runs after the request. A
message proves that its sending step has started and has read what it sent, but not that it has stored anything: a
forwarded chunk may leave before it is stored.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.ir import BufferMap
from mpi_gpucomp.schedule.verify.structure import StepRef, describe, error_at, step_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpi_gpucomp.schedule.ir import Algorithm
    from mpi_gpucomp.schedule.verify.deadlock import MatchedMessages

__all__ = ["check_races"]


def check_races(algorithm: Algorithm, order: Sequence[StepRef], messages: MatchedMessages) -> None:
    """Raise ScheduleError if the outcome depends on timing; `order` is one possible execution order."""
    by_rank: list[list[StepRef]] = [[] for _ in algorithm.programs]
    for ref in order:
        by_rank[ref.rank].append(ref)
    for rank, refs in enumerate(by_rank):
        buffers = BufferMap(algorithm.spec, rank, algorithm.programs[rank].scratch_chunks)
        number = {ref: position for position, ref in enumerate(refs)}
        ancestors = _local_ancestors(algorithm, number)
        for cell, earlier, later in _conflicts(algorithm, refs, buffers):
            if not ancestors[later] >> number[earlier] & 1 and not _ordered(algorithm, messages, earlier, later):
                expected = f"an order relative to {describe(algorithm, earlier)}"
                got = "a race: at least one of them writes"
                remedy = "Make one of them depend on the other."
                raise error_at(algorithm, later, buffers.name(cell), expected, got, remedy)


def _local_ancestors(algorithm: Algorithm, number: dict[StepRef, int]) -> dict[StepRef, int]:
    """Return, as bit sets, the steps of the rank that each step's lane and `after` put before it."""
    ancestors: dict[StepRef, int] = {}
    for ref, bit in number.items():
        found = 1 << bit
        for other in _local_predecessors(algorithm, ref):
            found |= ancestors[other]
        ancestors[ref] = found
    return ancestors


def _local_predecessors(algorithm: Algorithm, ref: StepRef) -> Iterator[StepRef]:
    if ref.step:
        yield ref._replace(step=ref.step - 1)
    for other in step_at(algorithm, ref).after:
        yield StepRef(ref.rank, *other)


def _conflicts(
    algorithm: Algorithm, refs: Sequence[StepRef], buffers: BufferMap
) -> Iterator[tuple[int, StepRef, StepRef]]:
    """Yield cell, earlier and later step of consecutive conflicting accesses.

    Consecutive accesses are enough: if each pair of them is ordered, all are.
    """
    writer: dict[int, StepRef] = {}
    readers: defaultdict[int, list[StepRef]] = defaultdict(list)
    for ref in refs:
        step = step_at(algorithm, ref)
        for place in step.reads:
            for cell in buffers.cells(place, step.count):
                if cell in writer:
                    yield cell, writer[cell], ref
                readers[cell].append(ref)
        for cell in buffers.cells(step.writes, step.count) if step.writes else ():
            for earlier in (*readers.pop(cell, ()), *filter(None, [writer.get(cell)])):
                if earlier != ref:
                    yield cell, earlier, ref
            writer[cell] = ref


def _ordered(algorithm: Algorithm, messages: MatchedMessages, earlier: StepRef, later: StepRef) -> bool:
    """Return True if a step must complete, in every execution, before a later one can start."""
    seen = {later}
    todo = [later]
    while todo:
        ref = todo.pop()
        before = list(_local_predecessors(algorithm, ref))
        send = messages.send_of.get(ref)
        if send is not None and (send != earlier or step_at(algorithm, send).kind in ("s", "rrs")):
            before.append(send)
        if earlier in before:
            return True
        fresh = set(before) - seen
        seen |= fresh
        todo.extend(fresh)
    return False
