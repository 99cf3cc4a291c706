"""Matches sends with receives, and finds an order in which all steps of all ranks can run, or a deadlock.

A message moves chunk by chunk, each as soon as the connection has room for it. A lane has one next step and a message
has one receiver, so the set of steps that can ever run does not depend on the order in which they are tried: where this
order deadlocks, all do. For the same reason one loop is enough, whatever a connection buffers: all messages of a loop
are received in it, so it leaves the connections empty, and running loop after loop is one of the possible orders.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.verify.structure import StepRef, describe, error_at, step_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi_gpucomp.errors import ScheduleError
    from mpi_gpucomp.schedule.ir import Algorithm

__all__ = ["MatchedMessages", "execution_order", "match_messages"]

Connection = tuple[int, int, int]
"""Sender, receiver, channel."""
Event = tuple[StepRef, int, str]
"""A chunk of a step is `taken` (received, or read from memory) and then `done` (stored, and sent if it is to be)."""

MAX_SHOWN = 6
"""Steps of a wait cycle that an error message names."""


@dataclass
class MatchedMessages:
    """The receive of each send, and the send of each receive."""

    receive_of: dict[StepRef, StepRef] = field(default_factory=dict)
    send_of: dict[StepRef, StepRef] = field(default_factory=dict)
    connections: dict[Connection, tuple[list[StepRef], list[StepRef]]] = field(default_factory=dict)
    """The sends and the receives of each connection, in order."""


def match_messages(algorithm: Algorithm) -> MatchedMessages:
    """Match the sends with the receives; raise ScheduleError where they do not agree."""
    messages = MatchedMessages(connections=_connections(algorithm))
    for (sender, receiver, channel), (sends, receives) in messages.connections.items():
        for send, receive in zip(sends, receives, strict=False):
            sent, received = step_at(algorithm, send).count, step_at(algorithm, receive).count
            if sent != received:
                expected = f"{received} chunk{'s' * (received != 1)}"
                got = f"{sent} from rank {sender}, {describe(algorithm, send)}"
                remedy = "Let both ends move the same chunks in the same order."
                raise error_at(algorithm, receive, "count", expected, got, remedy)
            messages.receive_of[send], messages.send_of[receive] = receive, send
        if len(sends) != len(receives):
            unmatched = [*sends[len(receives) :], *receives[len(sends) :]][0]
            end = f"receive on rank {receiver}" if len(sends) > len(receives) else f"send on rank {sender}"
            expected = f"a matching {end}, channel {channel}"
            raise error_at(algorithm, unmatched, "", expected, "none", "Give every message a send and a receive.")
    return messages


def _connections(algorithm: Algorithm) -> dict[Connection, tuple[list[StepRef], list[StepRef]]]:
    found: defaultdict[Connection, tuple[list[StepRef], list[StepRef]]] = defaultdict(lambda: ([], []))
    for rank, program in enumerate(algorithm.programs):
        for number, index, step in program.steps():
            lane, ref = program.lanes[number], StepRef(rank, number, index)
            if step.sends and lane.send is not None:
                found[rank, lane.send, lane.channel][0].append(ref)
            if step.receives and lane.receive is not None:
                found[lane.receive, rank, lane.channel][1].append(ref)
    return dict(found)


def execution_order(algorithm: Algorithm, messages: MatchedMessages, in_flight: int | None = None) -> list[StepRef]:
    """Return all steps in an order in which they can run, with at most `in_flight` chunks buffered per connection."""
    run = _Execution(algorithm, messages, in_flight)
    ready = deque(
        StepRef(rank, lane, 0) for rank, program in enumerate(algorithm.programs) for lane in range(len(program.lanes))
    )
    while ready:
        ready.extend(run.advance(ready.popleft()))
    if run.blocked:
        raise _deadlock(algorithm, {ref: event for event, refs in run.blocked.items() for ref in refs}, in_flight)
    return run.completed


class _Execution:
    """The progress of every lane."""

    def __init__(self, algorithm: Algorithm, messages: MatchedMessages, in_flight: int | None) -> None:
        """Start before the first step of every lane."""
        self._algorithm = algorithm
        self._happened: set[Event] = set()
        self._waits = _waits(algorithm, messages, in_flight)
        self.completed: list[StepRef] = []
        self.blocked: dict[Event, list[StepRef]] = {}
        """The steps that wait for an event."""

    def advance(self, ref: StepRef) -> list[StepRef]:
        """Run a lane from a step on until it blocks; return the steps that this has unblocked."""
        unblocked: list[StepRef] = []
        steps = self._algorithm.programs[ref.rank].lanes[ref.lane].steps
        while ref.step < len(steps):
            for event in _events(ref, steps[ref.step].count):
                if event in self._happened:
                    continue
                missing = next((other for other in self._waits[event] if other not in self._happened), None)
                if missing is not None:
                    self.blocked.setdefault(missing, []).append(ref)
                    return unblocked
                self._happened.add(event)
                unblocked += self.blocked.pop(event, ())
            self.completed.append(ref)
            ref = ref._replace(step=ref.step + 1)
        return unblocked


def _events(ref: StepRef, count: int) -> Iterator[Event]:
    for chunk in range(count):
        yield ref, chunk, "taken"
        yield ref, chunk, "done"


def _waits(algorithm: Algorithm, messages: MatchedMessages, in_flight: int | None) -> defaultdict[Event, list[Event]]:
    """Return what each event waits for besides its lane: dependencies, the message, and room in the connection."""
    waits: defaultdict[Event, list[Event]] = defaultdict(list)
    for rank, program in enumerate(algorithm.programs):
        for lane, index, step in program.steps():
            for other in step.after:
                last = program.lanes[other[0]].steps[other[1]].count - 1
                waits[StepRef(rank, lane, index), 0, "taken"].append((StepRef(rank, *other), last, "done"))
    for sends, receives in messages.connections.values():
        sent, taken = _chunks_of(algorithm, sends), _chunks_of(algorithm, receives)
        for send, receive in zip(sent, taken, strict=True):
            waits[(*receive, "taken")].append((*send, "done"))
        if in_flight is not None:
            for send, receive in zip(sent[in_flight:], taken, strict=False):
                waits[(*send, "done")].append((*receive, "taken"))
    return waits


def _chunks_of(algorithm: Algorithm, refs: list[StepRef]) -> list[tuple[StepRef, int]]:
    return [(ref, chunk) for ref in refs for chunk in range(step_at(algorithm, ref).count)]


def _deadlock(algorithm: Algorithm, missing: dict[StepRef, Event], in_flight: int | None) -> ScheduleError:
    cycle = _wait_cycle({ref: event[0] for ref, event in missing.items()})
    names = [f"rank {ref.rank}, {describe(algorithm, ref)}" for ref in (*cycle[1:], cycle[0])]
    if len(names) > MAX_SHOWN:
        names[MAX_SHOWN - 1 : -1] = [f"{len(names) - MAX_SHOWN} more steps"]
    got = f"a deadlock: it waits for {', which waits for '.join(names)}"
    remedy = "Reorder the steps, or remove a dependency."
    if any(missing[ref][2] == "taken" for ref in cycle):  # only a send to a full connection waits for that
        remedy = (
            f"Receive earlier, or remove a dependency: a connection buffers {in_flight} chunk{'s' * (in_flight != 1)}."
        )
    return error_at(algorithm, cycle[0], "", "a step that can run", got, remedy)


def _wait_cycle(missing: dict[StepRef, StepRef]) -> list[StepRef]:
    """Follow the waits until they repeat; a lane waits for what its next step waits for."""
    blocked = {(ref.rank, ref.lane): ref for ref in missing}
    path: dict[StepRef, None] = {}
    ref = min(missing)
    while ref not in path:
        path[ref] = None
        awaited = missing[ref]
        ref = blocked[awaited.rank, awaited.lane]
    refs = list(path)
    return refs[refs.index(ref) :]
