"""Pairs sends with receives, and finds an order in which all steps of all ranks can run, or who waits for whom.

A message goes chunk by chunk, and each as soon as there is room for it. A lane has one next step and a message one
taker, so what can ever run does not depend on the order in which one tries: where this one gets stuck, all do. For the
same reason one loop is enough: loop after loop is one of the orders in which several loops can run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.verify.diagnostics import StepRef, describe, fault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi_gpucomp.errors import ScheduleError
    from mpi_gpucomp.schedule.ir import Algorithm, Step

__all__ = ["Pairs", "executable", "paired"]

Connection = tuple[int, int, int]
"""Sender, receiver, channel."""
Event = tuple[StepRef, int, str]
"""A chunk of a step: taken, from the wire or from memory, or done, and sent if it is to be."""

SHOWN = 6
"""How many steps of a circle of waiting are named."""


@dataclass
class Pairs:
    """Which send belongs to which receive, and the other way round."""

    receive_of: dict[StepRef, StepRef] = field(default_factory=dict)
    send_of: dict[StepRef, StepRef] = field(default_factory=dict)
    connections: dict[Connection, tuple[list[StepRef], list[StepRef]]] = field(default_factory=dict)
    """The sends and the receives of each connection, in order."""


def paired(algorithm: Algorithm) -> Pairs:
    """Pair the sends with the receives; raise ScheduleError where they do not match."""
    pairs = Pairs(connections=_connections(algorithm))
    for (sender, receiver, channel), (sends, receives) in pairs.connections.items():
        for send, receive in zip(sends, receives, strict=False):
            sent, received = _step(algorithm, send).count, _step(algorithm, receive).count
            if sent != received:
                got = f"{sent} from rank {sender}, {describe(algorithm, send)}"
                remedy = "Let both ends move the same chunks in the same order."
                raise fault(algorithm, receive, "count", _chunks(received), got, remedy)
            pairs.receive_of[send], pairs.send_of[receive] = receive, send
        if len(sends) != len(receives):
            lonely = [*sends[len(receives) :], *receives[len(sends) :]][0]
            end = f"receive at rank {receiver}" if len(sends) > len(receives) else f"send at rank {sender}"
            expected = f"a {end} on channel {channel}"
            raise fault(algorithm, lonely, "", expected, "none that is left", "Let every message have two ends.")
    return pairs


def _connections(algorithm: Algorithm) -> dict[Connection, tuple[list[StepRef], list[StepRef]]]:
    found: defaultdict[Connection, tuple[list[StepRef], list[StepRef]]] = defaultdict(lambda: ([], []))
    for rank, program in enumerate(algorithm.programs):
        for number, index, step in program.steps():
            lane, spot = program.lanes[number], StepRef(rank, number, index)
            if step.sends and lane.send is not None:
                found[rank, lane.send, lane.channel][0].append(spot)
            if step.receives and lane.receive is not None:
                found[lane.receive, rank, lane.channel][1].append(spot)
    return dict(found)


def _step(algorithm: Algorithm, spot: StepRef) -> Step:
    return algorithm.programs[spot.rank].lanes[spot.lane].steps[spot.step]


def _chunks(count: int) -> str:
    return f"{count} chunk{'s' * (count != 1)}"


def executable(algorithm: Algorithm, pairs: Pairs, in_flight: int | None = None) -> list[StepRef]:
    """Return all steps in an order in which they can run, with `in_flight` chunks (any number) per connection."""
    run = _Run(algorithm, pairs, in_flight)
    ready = deque(
        StepRef(rank, lane, 0) for rank, program in enumerate(algorithm.programs) for lane in range(len(program.lanes))
    )
    while ready:
        ready.extend(run.advance(ready.popleft()))
    if run.asleep:
        raise _deadlock(algorithm, {spot: event[0] for event, spots in run.asleep.items() for spot in spots})
    return run.done


class _Run:
    """How far every lane has come: a step moves chunk after chunk, of which each is first taken and then done."""

    def __init__(self, algorithm: Algorithm, pairs: Pairs, in_flight: int | None) -> None:
        """Begin with nothing done."""
        self._algorithm = algorithm
        self._happened: set[Event] = set()
        self._waits = _waits(algorithm, pairs, in_flight)
        self.done: list[StepRef] = []
        self.asleep: dict[Event, list[StepRef]] = {}
        """The steps that wait for an event."""

    def advance(self, spot: StepRef) -> list[StepRef]:
        """Run a lane from a step on as far as it goes; return the steps that could go on now."""
        woken: list[StepRef] = []
        steps = self._algorithm.programs[spot.rank].lanes[spot.lane].steps
        while spot.step < len(steps):
            for event in _events(spot, steps[spot.step].count):
                if event in self._happened:
                    continue
                missing = next((other for other in self._waits[event] if other not in self._happened), None)
                if missing is not None:
                    self.asleep.setdefault(missing, []).append(spot)
                    return woken
                self._happened.add(event)
                woken += self.asleep.pop(event, ())
            self.done.append(spot)
            spot = spot._replace(step=spot.step + 1)
        return woken


def _events(spot: StepRef, count: int) -> Iterator[Event]:
    for chunk in range(count):
        yield spot, chunk, "taken"
        yield spot, chunk, "done"


def _waits(algorithm: Algorithm, pairs: Pairs, in_flight: int | None) -> defaultdict[Event, list[Event]]:
    """List what each event waits for besides its lane: steps that come before, a message, and room for another."""
    waits: defaultdict[Event, list[Event]] = defaultdict(list)
    for rank, program in enumerate(algorithm.programs):
        for lane, index, step in program.steps():
            for other in step.after:
                last = program.lanes[other[0]].steps[other[1]].count - 1
                waits[StepRef(rank, lane, index), 0, "taken"].append((StepRef(rank, *other), last, "done"))
    for sends, receives in pairs.connections.values():
        sent, taken = _chunks_of(algorithm, sends), _chunks_of(algorithm, receives)
        for send, receive in zip(sent, taken, strict=True):
            waits[(*receive, "taken")].append((*send, "done"))
        if in_flight is not None:
            for send, receive in zip(sent[in_flight:], taken, strict=False):
                waits[(*send, "done")].append((*receive, "taken"))
    return waits


def _chunks_of(algorithm: Algorithm, spots: list[StepRef]) -> list[tuple[StepRef, int]]:
    return [(spot, chunk) for spot in spots for chunk in range(_step(algorithm, spot).count)]


def _deadlock(algorithm: Algorithm, missing: dict[StepRef, StepRef]) -> ScheduleError:
    def named(spot: StepRef) -> str:
        return f"rank {spot.rank}, {describe(algorithm, spot)}"

    circle = _circle(missing)
    chain = [*circle[1:], circle[0]]
    said = [named(spot) for spot in chain]
    if len(said) > SHOWN:
        said[SHOWN - 1 : -1] = [f"{len(said) - SHOWN} more in turn"]
    got = f"a deadlock: it waits for {', which waits for '.join(said)}"
    remedy = "Change the order of the steps, or let go of a dependency."
    return fault(algorithm, circle[0], "", "to run at some time", got, remedy)


def _circle(missing: dict[StepRef, StepRef]) -> list[StepRef]:
    """Follow who waits for whom until it comes round; a lane waits where its next step does."""
    stuck = {(spot.rank, spot.lane): spot for spot in missing}
    path: dict[StepRef, None] = {}
    spot = min(missing)
    while spot not in path:
        path[spot] = None
        wanted = missing[spot]
        spot = stuck[wanted.rank, wanted.lane]
    spots = list(path)
    return spots[spots.index(spot) :]
