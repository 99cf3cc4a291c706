"""Simulated resources: time, cores, and a network whose links and ports are shared by messages.

Messages that share links or ports get max-min fair rates, as long TCP streams or those of a lossless fabric do:
bandwidth that one message cannot use, because it is limited elsewhere, goes to the others. Rates change when a message
starts or ends, and only for the messages connected to it by common ports.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import partial
from heapq import heappop, heappush
from math import ceil, inf
from typing import TYPE_CHECKING

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.cost import NO_MESSAGE_COST
from mpi_gpucomp.schedule.simulate.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpi_gpucomp.schedule.ir import Algorithm
    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["Connection", "Cores", "EventQueue", "FairNetwork", "Flow", "Interconnect", "RankQueue", "Work"]

RECEIVE_SLOTS = 2
"""Messages that a lane of the engine can receive ahead."""


class EventQueue:
    """Events in the order of their times; simultaneous ones in the order in which they were added."""

    __slots__ = ("_added", "_events", "now")

    def __init__(self) -> None:
        """Start at time zero."""
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._added = 0

    def at(self, time: float, callback: Callable[[], None]) -> None:
        """Call a function at a time."""
        self._added += 1
        heappush(self._events, (time, self._added, callback))

    def run(self) -> None:
        """Run until no event is left."""
        events = self._events
        while events:
            self.now, _, callback = heappop(events)
            callback()


class Work:
    """An item of a work queue: coding of a chunk, or handling of a message."""

    __slots__ = ("cause", "done", "ended", "kind", "loop", "nbytes", "number", "on_done", "seconds")

    def __init__(self, kind: str, loop: int, nbytes: float, seconds: float, cause: int) -> None:
        """Describe the work; `cause` is the number of the record whose end made it possible."""
        self.kind, self.loop, self.nbytes, self.seconds, self.cause = kind, loop, nbytes, seconds, cause
        self.done, self.number, self.ended = False, -1, 0.0
        self.on_done: Callable[[], None] | None = None


class Cores:
    """Cores that several work queues share, first come, first served."""

    def __init__(self, count: float) -> None:
        """Start with all cores free; a fractional count is rounded up, and all cores are slower instead."""
        self._free = ceil(count)
        self.slowdown = ceil(count) / count
        self._waiting: deque[Callable[[], None]] = deque()

    def acquire(self, start: Callable[[], None]) -> None:
        """Call `start` as soon as a core is free."""
        if self._free:
            self._free -= 1
            start()
        else:
            self._waiting.append(start)

    def release(self) -> None:
        """Give the core to the next in line."""
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._free += 1


class RankQueue:
    """The work of a rank, done in order."""

    def __init__(self, events: EventQueue, rank: int, records: list[Record], cores: Cores | None) -> None:
        """Use shared cores, or a private one."""
        self._events, self._rank, self._records, self._cores = events, rank, records, cores
        self._queue: deque[Work] = deque()
        self._last = -1

    def add(self, work: Work) -> None:
        """Append an item."""
        self._queue.append(work)
        if len(self._queue) == 1:
            self._next()

    def _next(self) -> None:
        if self._cores is None:
            self._start()
        else:
            self._cores.acquire(self._start)

    def _start(self) -> None:
        work, now = self._queue[0], self._events.now
        # The cause is what it waited for longest: the item before it in this queue, if that has just ended.
        queued = self._last >= 0 and self._records[self._last].end >= now
        work.number = len(self._records)
        cause = self._last if queued else work.cause
        end = now + work.seconds * (self._cores.slowdown if self._cores else 1.0)
        self._records.append(Record(work.kind, self._rank, -1, work.loop, work.nbytes, now, end, cause))
        self._events.at(end, partial(self._end, work))

    def _end(self, work: Work) -> None:
        self._queue.popleft()
        self._last, work.done, work.ended = work.number, True, self._events.now
        if self._cores is not None:
            self._cores.release()
        if self._queue:
            self._next()
        if work.on_done is not None:
            work.on_done()


class Flow:
    """A message in flight on shared resources: the bytes left, and the current rate."""

    __slots__ = ("left", "limit", "on_arrival", "rate", "revision", "since", "through")

    def __init__(self, nbytes: float, limit: float, through: Sequence[int], on_arrival: Callable[[], None]) -> None:
        """Send `nbytes` at no more than `limit` bytes per second through these shared resources."""
        self.left, self.limit, self.through, self.on_arrival = nbytes, limit, through, on_arrival
        self.rate, self.since, self.revision = 0.0, 0.0, 0


class FairNetwork:
    """Shared resources, each with a rate in bytes per second."""

    def __init__(self, events: EventQueue, rates: Sequence[float]) -> None:
        """Start with no message in flight."""
        self._events, self._rates = events, rates
        # Not sets: the order must be the same in every run.
        self._users: list[dict[Flow, None]] = [{} for _ in rates]

    def start(self, flow: Flow) -> None:
        """Start a message."""
        flow.since = self._events.now
        for number in flow.through:
            self._users[number][flow] = None
        self._share(self._connected([flow]))

    def _finish(self, flow: Flow, revision: int) -> None:
        if revision != flow.revision:
            return  # its rate has changed meanwhile, and so has the time of its arrival
        for number in flow.through:
            del self._users[number][flow]
        neighbours = dict.fromkeys(other for number in flow.through for other in self._users[number])
        self._share(self._connected(list(neighbours)))
        flow.on_arrival()

    def _connected(self, flows: list[Flow]) -> list[Flow]:
        """Return the flows that share a resource with these, directly or through others."""
        seen, seen_resources = dict.fromkeys(flows), set[int]()
        todo = list(flows)
        while todo:
            for number in todo.pop().through:
                if number not in seen_resources:
                    seen_resources.add(number)
                    fresh = [other for other in self._users[number] if other not in seen]
                    seen.update(dict.fromkeys(fresh))
                    todo += fresh
        return list(seen)

    def _share(self, flows: list[Flow]) -> None:
        """Set max-min fair rates of flows that share nothing with others."""
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
            limited = [flow for flow in open_flows if flow.limit <= level or not full.isdisjoint(flow.through)]
            for flow in limited:
                del open_flows[flow]
                self._set_rate(flow, level)
                for number in flow.through:
                    left[number] = max(0.0, left[number] - level)
                    count[number] -= 1

    def _set_rate(self, flow: Flow, rate: float) -> None:
        if rate == flow.rate:
            return
        now = self._events.now
        flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
        flow.rate, flow.since, flow.revision = rate, now, flow.revision + 1
        self._events.at(now + flow.left / rate, partial(self._finish, flow, flow.revision))


class Connection:
    """The messages from one rank to another on a channel, of which one is in flight at a time."""

    __slots__ = (
        "arrived",
        "busy",
        "latency",
        "limit",
        "on_arrival",
        "posted",
        "raw",
        "receiver",
        "sender",
        "slots",
        "through",
    )

    def __init__(self, sender: int, receiver: int, latency: float, limit: float, through: list[int]) -> None:
        """Send at no more than `limit` bytes per second, through these shared resources."""
        self.sender, self.receiver, self.latency, self.limit, self.through = sender, receiver, latency, limit, through
        self.posted: deque[tuple[float, int, int]] = deque()
        """Bytes, loop and cause of each message that has not started."""
        self.arrived: deque[int] = deque()
        """The records of messages that have arrived and were not taken."""
        self.busy, self.slots, self.raw = False, RECEIVE_SLOTS, False
        self.on_arrival: Callable[[], None] | None = None


class Interconnect:
    """All connections of an algorithm on a topology."""

    def __init__(
        self,
        events: EventQueue,
        algorithm: Algorithm,
        topology: Topology,
        records: list[Record],
        cores: Mapping[int, Cores] | None = None,
    ) -> None:
        """Find the resources that connections share; ranks handle their messages on these cores."""
        self._events, self._records, self.message_cost = events, records, topology.message_cost
        queues = [RankQueue(events, rank, records, (cores or {}).get(rank)) for rank in range(topology.ranks)]
        self._handlers = queues if topology.message_cost != NO_MESSAGE_COST else None
        keys = dict.fromkeys(
            (rank, lane.send, lane.channel)
            for rank, program in enumerate(algorithm.programs)
            for lane in program.lanes
            if lane.send is not None
        )
        resources = {key: _resources(topology, key[0], key[1]) for key in keys}
        users = Counter(name for own in resources.values() for name, _ in own)
        shared = {name: number for number, name in enumerate(name for name, count in users.items() if count > 1)}
        rates = [0.0] * len(shared)
        self.connections: dict[tuple[int, int, int], Connection] = {}
        for key, own in resources.items():
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
                    self.connections[rank, lane.send, lane.channel].raw = True
        self._network = FairNetwork(events, rates)

    def post(self, connection: Connection, nbytes: float, loop: int, cause: int) -> None:
        """Post a message; it is ready to leave once the sender has handled it."""
        if self._handlers is None:
            self._ready(connection, nbytes, loop, cause)
            return
        work = Work("handle", loop, nbytes, self.message_cost.seconds(nbytes), cause)
        work.on_done = lambda: self._ready(connection, nbytes, loop, work.number)
        self._handlers[connection.sender].add(work)

    def _ready(self, connection: Connection, nbytes: float, loop: int, cause: int) -> None:
        connection.posted.append((nbytes, loop, cause))
        if not connection.busy and connection.slots:
            self._start(connection, cause)

    def take(self, connection: Connection) -> int:
        """Take the next message, which has arrived, and free its slot; return its record."""
        number = connection.arrived.popleft()
        connection.slots += 1
        if not connection.busy and connection.posted:
            self._start(connection, number)
        return number

    def _start(self, connection: Connection, cause: int) -> None:
        nbytes, loop, posted = connection.posted.popleft()
        connection.busy, connection.slots = True, connection.slots - 1
        now = self._events.now
        # The later of two causes lets it start: that it was posted, or that the connection and a slot were free.
        if posted >= 0 and (cause < 0 or self._records[posted].end >= self._records[cause].end):
            cause = posted
        arrive = partial(self._arrive, connection, nbytes, loop, now, cause)
        if not connection.through or not nbytes:
            self._events.at(now + connection.latency + nbytes / connection.limit, arrive)
        else:
            flow = Flow(nbytes, connection.limit, connection.through, arrive)
            self._events.at(now + connection.latency, partial(self._network.start, flow))

    def _arrive(self, connection: Connection, nbytes: float, loop: int, start: float, cause: int) -> None:
        number = len(self._records)
        sender, receiver, now = connection.sender, connection.receiver, self._events.now
        self._records.append(Record("send", sender, receiver, loop, nbytes, start, now, cause))
        connection.busy = False
        if connection.posted and connection.slots:
            self._start(connection, number)
        if self._handlers is None:
            self._deliver(connection, number)
        else:
            work = Work("handle", loop, nbytes, self.message_cost.seconds(nbytes), number)
            work.on_done = lambda: self._deliver(connection, work.number)
            handler = self._handlers[receiver]
            self._events.at(now + self.message_cost.wait, lambda: handler.add(work))

    def _deliver(self, connection: Connection, number: int) -> None:
        """Make a message available to the receiving lane."""
        connection.arrived.append(number)
        if connection.on_arrival is not None:
            connection.on_arrival()


def _resources(topology: Topology, sender: int, receiver: int) -> list[tuple[object, float]]:
    """Return name and seconds per byte of the link and the ports that a message passes."""
    link = topology.link(sender, receiver)
    if link is None:
        raise SpecError(
            f"topology {topology.name}",
            expected=f"a link from rank {sender} to rank {receiver}, which the schedule uses",
            got="none",
            remedy="Choose an algorithm that uses existing links, or synthesise one.",
        )
    ports = topology.ports_of(sender, receiver)
    return [((sender, receiver), link.per_byte), *((number, topology.ports[number].per_byte) for number in ports)]


def _rate(per_byte: float) -> float:
    return 1 / per_byte if per_byte else 1e30
