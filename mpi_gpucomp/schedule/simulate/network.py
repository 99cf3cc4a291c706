"""Messages on links and ports that several of them share: each gets its fair part of what is there.

The shares are max-min fair, as long streams of TCP or of a lossless fabric come to have them: what one message cannot
use, because it is held up elsewhere, the others get. A share changes when a message joins or leaves, and only for
those that are joined to it by ports in common.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.cost import NO_MESSAGE_COST
from mpi_gpucomp.schedule.simulate.lane import Stream, Work
from mpi_gpucomp.schedule.simulate.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpi_gpucomp.schedule.ir import Algorithm
    from mpi_gpucomp.schedule.simulate.lane import Cores
    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["Clock", "Connection", "Flow", "Network", "Wire"]


class Flow:
    """A message that moves: what is left of it, and how fast."""

    __slots__ = ("arrived", "left", "limit", "rate", "since", "through", "turn")

    def __init__(self, nbytes: float, limit: float, through: Sequence[int], arrived: Callable[[], None]) -> None:
        """Move so many bytes at `limit` bytes a second at most, through these shared things."""
        self.left, self.limit, self.through, self.arrived = nbytes, limit, through, arrived
        self.rate, self.since, self.turn = 0.0, 0.0, 0


class Network:
    """What messages share: each thing has a rate in bytes a second."""

    def __init__(self, clock: Clock, rates: Sequence[float]) -> None:
        """Begin with nothing on its way."""
        self._clock, self._rates = clock, rates
        # Not sets: the order must be the same in every run.
        self._using: list[dict[Flow, None]] = [{} for _ in rates]

    def join(self, flow: Flow) -> None:
        """Let a message set out."""
        flow.since = self._clock.now
        for number in flow.through:
            self._using[number][flow] = None
        self._share(self._joined([flow]))

    def _leave(self, flow: Flow, turn: int) -> None:
        if turn != flow.turn:
            return  # its share has changed since, and so has the time of its arrival
        for number in flow.through:
            del self._using[number][flow]
        touched = dict.fromkeys(other for number in flow.through for other in self._using[number])
        self._share(self._joined(list(touched)))
        flow.arrived()

    def _joined(self, flows: list[Flow]) -> list[Flow]:
        """Return all that share something with these, or with one that does, and so on."""
        seen, seen_ports = dict.fromkeys(flows), set[int]()
        todo = list(flows)
        while todo:
            for number in todo.pop().through:
                if number not in seen_ports:
                    seen_ports.add(number)
                    fresh = [other for other in self._using[number] if other not in seen]
                    seen.update(dict.fromkeys(fresh))
                    todo += fresh
        return list(seen)

    def _share(self, flows: list[Flow]) -> None:
        """Share out what there is among flows that nobody else shares anything with."""
        open_flows = dict.fromkeys(flows)
        left = {number: self._rates[number] for flow in flows for number in flow.through}
        count = dict.fromkeys(left, 0)
        for flow in flows:
            for number in flow.through:
                count[number] += 1
        while open_flows:
            level = min(left[number] / count[number] for number in left if count[number])
            level = min(level, min(flow.limit for flow in open_flows))
            full = {number for number in left if count[number] and left[number] / count[number] <= level * (1 + 1e-12)}
            settled = [flow for flow in open_flows if flow.limit <= level or not full.isdisjoint(flow.through)]
            for flow in settled:
                del open_flows[flow]
                self._set_rate(flow, level)
                for number in flow.through:
                    left[number] = max(0.0, left[number] - level)
                    count[number] -= 1

    def _set_rate(self, flow: Flow, rate: float) -> None:
        if rate == flow.rate:
            return
        now = self._clock.now
        flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
        flow.rate, flow.since, flow.turn = rate, now, flow.turn + 1
        self._clock.at(now + flow.left / rate, partial(self._leave, flow, flow.turn))


# The connections of a schedule: messages one after the other, with room for few of them at the receiver.

AHEAD = 2
"""Messages that a lane of the engine has room for before it needs them."""


class Connection:
    """One rank's messages to another on a channel, of which one is under way at a time."""

    __slots__ = (
        "arrived",
        "busy",
        "latency",
        "limit",
        "plain",
        "posted",
        "receiver",
        "room",
        "sender",
        "through",
        "wake",
    )

    def __init__(self, sender: int, receiver: int, latency: float, limit: float, through: list[int]) -> None:
        """Send at `limit` bytes a second at most, through what is shared."""
        self.sender, self.receiver, self.latency, self.limit, self.through = sender, receiver, latency, limit, through
        self.posted: deque[tuple[float, int, int]] = deque()
        """Bytes, loop and cause of each message that waits."""
        self.arrived: deque[int] = deque()
        """The records of messages that are there and were not taken."""
        self.busy, self.room, self.plain = False, AHEAD, False
        self.wake: Callable[[], None] | None = None


class Wire:
    """All connections of an algorithm on a topology."""

    def __init__(
        self,
        clock: Clock,
        algorithm: Algorithm,
        topology: Topology,
        records: list[Record],
        cores: Mapping[int, Cores] | None = None,
    ) -> None:
        """Find out which connections share what; ranks handle their messages on these cores."""
        self._clock, self._records, self.message_cost = clock, records, topology.message_cost
        costs = topology.message_cost != NO_MESSAGE_COST
        hands = [Stream(clock, rank, records, (cores or {}).get(rank)) for rank in range(topology.ranks)]
        self._hands = hands if costs else None
        keys = dict.fromkeys(
            (rank, lane.send, lane.channel)
            for rank, program in enumerate(algorithm.programs)
            for lane in program.lanes
            if lane.send is not None
        )
        parts = {key: _parts(topology, key[0], key[1]) for key in keys}
        users = Counter(name for own in parts.values() for name, _ in own)
        shared = {name: number for number, name in enumerate(name for name, count in users.items() if count > 1)}
        rates = [0.0] * len(shared)
        self.connections: dict[tuple[int, int, int], Connection] = {}
        for key, own in parts.items():
            for name, per_byte in own:
                if name in shared:
                    rates[shared[name]] = _rate(per_byte)
            through = [shared[name] for name, _ in own if name in shared]
            limit = min((_rate(per_byte) for name, per_byte in own if name not in shared), default=inf)
            link = topology.link(key[0], key[1])
            assert link is not None
            latency = link.latency + topology.per_chunk
            self.connections[key] = Connection(key[0], key[1], latency, limit, through)
        for rank, program in enumerate(algorithm.programs):
            for lane in program.lanes:
                if lane.send is not None and lane.raw:
                    self.connections[rank, lane.send, lane.channel].plain = True
        self._network = Network(clock, rates)

    def post(self, connection: Connection, nbytes: float, loop: int, cause: int) -> None:
        """Have a message ready to leave, once the sender has handled it."""
        if self._hands is None:
            self._line_up(connection, nbytes, loop, cause)
            return
        work = Work("handle", loop, nbytes, self.message_cost.seconds(nbytes), cause)
        work.wake = lambda: self._line_up(connection, nbytes, loop, work.number)
        self._hands[connection.sender].add(work)

    def _line_up(self, connection: Connection, nbytes: float, loop: int, cause: int) -> None:
        connection.posted.append((nbytes, loop, cause))
        if not connection.busy and connection.room:
            self._start(connection, cause)

    def take(self, connection: Connection) -> int:
        """Take the next message, which is there, and make room for another; return its record."""
        number = connection.arrived.popleft()
        connection.room += 1
        if not connection.busy and connection.posted:
            self._start(connection, number)
        return number

    def _start(self, connection: Connection, cause: int) -> None:
        nbytes, loop, posted = connection.posted.popleft()
        connection.busy, connection.room = True, connection.room - 1
        now = self._clock.now
        # The later of the two let it begin: that it was ready, or that the wire and the receiver were.
        if posted >= 0 and (cause < 0 or self._records[posted].end >= self._records[cause].end):
            cause = posted
        if not connection.through or not nbytes:
            end = now + connection.latency + nbytes / connection.limit
            self._clock.at(end, partial(self._arrive, connection, nbytes, loop, now, cause))
        else:
            arrive = partial(self._arrive, connection, nbytes, loop, now, cause)
            flow = Flow(nbytes, connection.limit, connection.through, arrive)
            self._clock.at(now + connection.latency, partial(self._network.join, flow))

    def _arrive(self, connection: Connection, nbytes: float, loop: int, start: float, cause: int) -> None:
        number = len(self._records)
        sender, receiver, now = connection.sender, connection.receiver, self._clock.now
        self._records.append(Record("send", sender, receiver, loop, nbytes, start, now, cause))
        connection.busy = False
        if connection.posted and connection.room:
            self._start(connection, number)
        if self._hands is None:
            self._there(connection, number)
        else:
            work = Work("handle", loop, nbytes, self.message_cost.seconds(nbytes), number)
            work.wake = lambda: self._there(connection, work.number)
            hands = self._hands[receiver]
            self._clock.at(now + self.message_cost.wait, lambda: hands.queue(work))

    def _there(self, connection: Connection, number: int) -> None:
        """Let the receiver have a message, which it has handled."""
        connection.arrived.append(number)
        if connection.wake is not None:
            connection.wake()


def _parts(topology: Topology, sender: int, receiver: int) -> list[tuple[object, float]]:
    """Name all that a message goes through: the link itself, and ports."""
    link = topology.link(sender, receiver)
    if link is None:
        raise SpecError(
            f"topology {topology.name}",
            expected=f"a link from rank {sender} to rank {receiver}, which the schedule uses",
            got="none",
            remedy="Choose an algorithm, or synthesise one, that keeps to the links that there are.",
        )
    ports = topology.ports_of(sender, receiver)
    return [((sender, receiver), link.per_byte), *((number, topology.ports[number].per_byte) for number in ports)]


def _rate(per_byte: float) -> float:
    return 1 / per_byte if per_byte else 1e30


# The time of a simulation: what is to happen when, in order.


class Clock:
    """Events in the order of their times, and of their making where they fall together."""

    __slots__ = ("_events", "_made", "now")

    def __init__(self) -> None:
        """Begin at zero."""
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0

    def at(self, time: float, happen: Callable[[], None]) -> None:
        """Let something happen at a time."""
        self._made += 1
        heappush(self._events, (time, self._made, happen))

    def run(self) -> None:
        """Go on until nothing is left to happen."""
        events = self._events
        while events:
            self.now, _, happen = heappop(events)
            happen()
