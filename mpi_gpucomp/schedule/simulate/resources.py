"""Simulated resources: time, cores, and a network whose links and ports are shared by messages; each records its work.

Messages that share links or ports get max-min fair rates, as long TCP streams or those of a lossless fabric do:
bandwidth that one message cannot use, because it is limited elsewhere, goes to the others. Rates change when a message
starts or ends, and only for the messages connected to it by common ports.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.cost import NO_MESSAGE_COST
from mpi_gpucomp.schedule.ir import BUFFERED_CHUNKS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpi_gpucomp.schedule.ir import Algorithm
    from mpi_gpucomp.schedule.topology import Topology

__all__ = [
    "Connection",
    "Cores",
    "EventQueue",
    "FairNetwork",
    "Flow",
    "Interconnect",
    "Message",
    "RankQueue",
    "Record",
    "Work",
]


class Record(NamedTuple):
    """A message (`send`), work on a chunk (`encode`, `decode`, `reduce`, `copy`) or on a message (`handle`)."""

    kind: str
    rank: int
    peer: int
    """The receiver of a message; -1 for work."""
    loop: int
    nbytes: float
    """Bytes sent, or worked on."""
    start: float
    end: float
    cause: int
    """The number of the record whose end allowed this one to start; -1 for none."""

    def __str__(self) -> str:
        """Return sender and receiver, or the rank and its work."""
        return f"{self.rank} -> {self.peer}" if self.kind == "send" else f"rank {self.rank} {self.kind}s"


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


class Message:
    """A chunk on a connection, from the moment that it is posted."""

    __slots__ = (
        "begun",
        "cause",
        "delivered",
        "loop",
        "nbytes",
        "noticed",
        "number",
        "on_noticed",
        "previous",
        "record",
        "relay",
        "source",
        "start",
    )

    def __init__(self, nbytes: float, loop: int, cause: int, source: Message | None) -> None:
        """Describe the message; if it relays another one, that is its `source`."""
        self.nbytes, self.loop, self.cause, self.source = nbytes, loop, cause, source
        self.previous = source
        """The message that it waits for, besides its cause."""
        self.relay: Message | None = None
        self.start, self.record, self.number = 0.0, -1, -1
        """When it leaves, the record of its arrival, and that which ends when the lane can take it."""
        self.begun = self.noticed = self.delivered = False
        """Whether the receiver knows of its first segment, knows of all of it, and has handled it."""
        self.on_noticed: Callable[[], None] | None = None


class Connection:
    """The messages from one rank to another on a channel, which leave one after the other."""

    __slots__ = (
        "inbox",
        "latency",
        "limit",
        "on_arrival",
        "on_room",
        "per_chunk",
        "posted",
        "raw",
        "receiver",
        "relays",
        "room",
        "sender",
        "sending",
        "through",
    )

    def __init__(self, sender: int, receiver: int, latency: float, per_chunk: float) -> None:
        """Start idle; a message takes the sender `per_chunk` seconds besides its time on the link."""
        self.sender, self.receiver, self.latency, self.per_chunk = sender, receiver, latency, per_chunk
        self.limit, self.through = inf, list[int]()
        """The most bytes per second, and the shared resources that messages pass."""
        self.posted: deque[Message] = deque()
        """Messages that have not started."""
        self.inbox: deque[Message] = deque()
        """Messages that the receiver can relay or take."""
        self.sending = self.raw = self.relays = False
        """Whether a message is leaving, whether messages are raw, and whether the receiver can relay them."""
        self.room = BUFFERED_CHUNKS
        self.on_arrival: Callable[[], None] | None = None
        self.on_room: Callable[[], None] | None = None


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
        self._segment = topology.relay_bytes
        self.connections: dict[tuple[int, int, int], Connection] = {}
        resources: dict[tuple[int, int, int], list[tuple[object, float]]] = {}
        lanes = [(rank, lane) for rank, program in enumerate(algorithm.programs) for lane in program.lanes]
        for rank, lane in lanes:
            if lane.send is not None:
                key = rank, lane.send, lane.channel
                latency, resources[key] = _resources(topology, rank, lane.send)
                self.connections[key] = Connection(rank, lane.send, latency, topology.per_chunk)
                self.connections[key].raw = lane.raw
        for rank, lane in lanes:
            if lane.receive is not None and (lane.receive, rank, lane.channel) in self.connections:
                connection = self.connections[lane.receive, rank, lane.channel]
                connection.relays = self._segment > 0 and _between_nodes(topology, lane.receive, rank, lane.send)
        users = Counter(name for own in resources.values() for name, _ in own)
        shared = {name: number for number, name in enumerate(name for name, count in users.items() if count > 1)}
        rates = [0.0] * len(shared)
        for key, own in resources.items():
            for name, per_byte in own:
                if name in shared:
                    rates[shared[name]] = _rate(per_byte)
            connection = self.connections[key]
            connection.through = [shared[name] for name, _ in own if name in shared]
            connection.limit = min((_rate(per_byte) for name, per_byte in own if name not in shared), default=inf)
        self._network = FairNetwork(events, rates)

    def post(self, connection: Connection, nbytes: float, loop: int, cause: int, source: Message | None = None) -> None:
        """Post a message, for which the connection has room; it can leave once the sender has handled it.

        With a `source` it relays that message.
        """
        connection.room -= 1
        message = Message(nbytes, loop, cause, source)
        if source is not None:
            source.relay = message
        if self._handlers is None:
            self._ready(connection, message)
            return
        # The other segments of a relayed message are handled when it has arrived.
        first = nbytes if source is None else min(nbytes, self._segment)
        work = Work("handle", loop, nbytes, self.message_cost.seconds(first), cause)

        def handled() -> None:
            message.cause = work.number
            self._ready(connection, message)

        work.on_done = handled
        self._handlers[connection.sender].add(work)

    def take(self, connection: Connection) -> int:
        """Take the next message, which has been delivered, and make room for another; return its record."""
        connection.room += 1
        if connection.on_room is not None:
            self._events.at(self._events.now, connection.on_room)
            connection.on_room = None
        return connection.inbox.popleft().number

    def _ready(self, connection: Connection, message: Message) -> None:
        connection.posted.append(message)
        if not connection.sending:
            self._start(connection)

    def _start(self, connection: Connection, before: Message | None = None) -> None:
        """Send the next message: a first segment if it may be relayed, and its last one once its source has arrived."""
        message, events = connection.posted.popleft(), self._events
        connection.sending, message.start, message.previous = True, events.now, before or message.previous
        head = self._segment if connection.relays and message.nbytes > self._segment else 0.0
        tail = min(self._segment, message.nbytes - head) if message.source else 0.0

        def send_body() -> None:
            if head:
                begins = events.now + connection.latency + self.message_cost.wait
                events.at(begins, partial(self._begin, connection, message))
            self._send(connection, message.nbytes - head - tail, send_tail)

        def send_tail() -> None:
            source = message.source
            if source is None or source.noticed:
                self._send(connection, tail, partial(self._leave, connection, message))
            else:
                source.on_noticed, message.previous = send_tail, source

        events.at(events.now + connection.per_chunk, partial(self._send, connection, head, send_body))

    def _send(self, connection: Connection, nbytes: float, then: Callable[[], None]) -> None:
        """Occupy the link for a part of a message."""
        if not nbytes:
            then()
        elif connection.through:
            self._network.start(Flow(nbytes, connection.limit, connection.through, then))
        else:
            self._events.at(self._events.now + nbytes / connection.limit, then)

    def _leave(self, connection: Connection, message: Message) -> None:
        """Free the link: a latency later the message has arrived."""
        self._events.at(self._events.now + connection.latency, partial(self._arrive, connection, message))
        connection.sending = False
        if connection.posted:
            self._start(connection, message)

    def _begin(self, connection: Connection, message: Message) -> None:
        """Let the receiving lane relay a message."""
        message.begun = True
        self._show(connection, message)

    def _arrive(self, connection: Connection, message: Message) -> None:
        message.record = message.number = len(self._records)
        cause = message.cause
        # The later of two causes lets it leave: that it was posted, or that another message has left or arrived.
        if message.previous and (cause < 0 or self._records[message.previous.record].end >= self._records[cause].end):
            cause = message.previous.record
        ends = connection.sender, connection.receiver
        self._records.append(
            Record("send", *ends, message.loop, message.nbytes, message.start, self._events.now, cause)
        )
        self._events.at(self._events.now + self.message_cost.wait, partial(self._notice, connection, message))

    def _notice(self, connection: Connection, message: Message) -> None:
        message.noticed = True
        if message.on_noticed is not None:
            message.on_noticed()
        if self._handlers is None:
            self._deliver(connection, message)
            return
        seconds = self.message_cost.seconds(message.nbytes)
        if message.relay is not None:
            seconds += self.message_cost.per_byte * (message.nbytes - self._segment)
        work = Work("handle", message.loop, message.nbytes, seconds, message.record)

        def handled() -> None:
            message.number = work.number
            self._deliver(connection, message)

        work.on_done = handled
        self._handlers[connection.receiver].add(work)

    def _deliver(self, connection: Connection, message: Message) -> None:
        """Let the receiving lane take a message."""
        message.delivered = True
        self._show(connection, message)

    def _show(self, connection: Connection, message: Message) -> None:
        if not (message.begun and message.delivered):
            connection.inbox.append(message)
        if connection.on_arrival is not None:
            connection.on_arrival()


def _between_nodes(topology: Topology, *ranks: int | None) -> bool:
    """Return True if each of these ranks has the next one on another node."""
    nodes = [None if rank is None else topology.node_of(rank) for rank in ranks]
    return all(None not in pair and pair[0] != pair[1] for pair in pairwise(nodes))


def _resources(topology: Topology, sender: int, receiver: int) -> tuple[float, list[tuple[object, float]]]:
    """Return the latency of a link, and name and seconds per byte of all that a message passes: link and ports."""
    link = topology.link(sender, receiver)
    if link is None:
        raise SpecError(
            f"topology {topology.name}",
            expected=f"a link from rank {sender} to rank {receiver}, which the schedule uses",
            got="none",
            remedy="Choose an algorithm that uses existing links, or synthesise one.",
        )
    ports = topology.ports_of(sender, receiver)
    passed = ((number, topology.ports[number].per_byte) for number in ports)
    return link.latency, [((sender, receiver), link.per_byte), *passed]


def _rate(per_byte: float) -> float:
    return 1 / per_byte if per_byte else 1e30
