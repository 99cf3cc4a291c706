"""A link: all packets to and from one peer, on the paths that exist.

Paths are ordered in tiers: those of the first tier with a live path carry the traffic, the others stand by. A broken
path is closed by both ends, which exchange their state over another path, or over the next one. A path may need time to
close, until it neither writes to the callers' memory nor reads from it; it is not reported as closed before. A path of
a better tier is used from the next message on: packets already posted stay on their paths.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.transport.rails.sequence import (
    ACK,
    BYE,
    CONTROL,
    DATA,
    EAGER,
    PING,
    RTS,
    STATE,
    AckState,
    Outgoing,
    PacketHeader,
    ReceiveSequence,
    SendSequence,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi_gpucomp.transport.rails.messages import TagMatcher
    from mpi_gpucomp.transport.rails.sequence import PathId, Payload

__all__ = ["ALIVE", "DEAD", "IDLE_SECONDS", "SUSPECT", "Failover", "Path", "RailLink", "check_liveness"]

ALIVE, SUSPECT, DEAD = "alive", "suspect", "dead"
PROBE_AFTER = 0.25
"""The share of the timeout after which a silent path is probed; the rest is for the answer."""
IDLE_SECONDS = 5.0
"""How long an idle path may be silent before it is probed."""


def check_liveness(now: float, last_seen: float, probed: float, timeout: float, *, busy: bool) -> str:
    """Return ALIVE, SUSPECT (probe now) or DEAD.

    A probe that reaches the peer's kernel is a sign of life, whatever the peer's process does. One that does not get
    there in time means that the path is dead, and not that the peer has nothing to send.
    """
    if probed > last_seen:
        return DEAD if now - probed > timeout * (1 - PROBE_AFTER) else ALIVE
    allowed = timeout * PROBE_AFTER if busy else max(timeout, IDLE_SECONDS)
    return SUSPECT if now - last_seen > allowed else ALIVE


class Failover(NamedTuple):
    """A path that was lost, and the time it cost."""

    peer: int
    rail: int
    reason: str
    silence: float
    """Seconds from the last sign of life to the detection."""
    downtime: float | None
    """Seconds from the last sign of life until both ends had resynchronised; None if they have not yet."""


class _FailoverLog:
    """The failovers of one link."""

    def __init__(self, peer: int, rails: int) -> None:
        self.peer, self.all = peer, list[Failover]()
        self._peer_closed = [0] * rails
        """For each rail, the last generation that the peer is known to have closed."""
        self._open: dict[int, tuple[PathId, float]] = {}

    def add(self, path: PathId, reason: str, last_seen: float, now: float) -> None:
        """Record a path that is lost now, with the time of its last sign of life."""
        self._open[len(self.all)] = path, last_seen
        self.all.append(Failover(self.peer, path.rail, reason, now - last_seen, None))

    def on_peer_closed(self, closed: Sequence[int]) -> None:
        """Note the generations that the peer has closed."""
        self._peer_closed = list(map(max, self._peer_closed, closed))

    def resolve(self, closed: Sequence[int], now: float) -> None:
        """Complete the records of paths that are closed here (`closed`) and at the peer."""
        for number, (path, last_seen) in list(self._open.items()):
            if path.generation <= min(closed[path.rail], self._peer_closed[path.rail]):
                self.all[number] = self.all[number]._replace(downtime=now - last_seen)
                del self._open[number]


class Path(ABC):
    """One connection to a peer on one rail, ordered and reliable while it lasts.

    It takes packets to send from its link, and hands it those that arrive.
    """

    def __init__(self, path_id: PathId) -> None:
        """Create the path of this rail and generation."""
        self.id = path_id
        self.urgent: deque[tuple[int, Payload]] = deque()
        """Kind and payload of packets out of sequence, which are sent first."""
        self.probed = 0.0
        """When it was probed last."""
        self.since = time.monotonic()
        """When it was created."""

    def send_urgent(self, kind: int, payload: Payload = b"") -> None:
        """Send a packet out of sequence as soon as possible."""
        self.urgent.append((kind, payload))
        self.wake()

    @abstractmethod
    def wake(self) -> None:
        """Schedule a flush: the link has packets to send. Nothing is sent before the caller releases the lock."""

    @abstractmethod
    def last_seen(self, now: float) -> float:
        """Return the time of the last sign of life."""

    @abstractmethod
    def fault(self) -> str | None:
        """Return why this end cannot use the path, if it knows: the device has no carrier."""

    @abstractmethod
    def close(self, on_closed: Callable[[], None]) -> None:
        """Close the connection, and deliver nothing more.

        Call `on_closed` once, now or later: when the callers' memory cannot be written or read any more.
        """

    def poll_close(self) -> None:  # noqa: B027
        """Progress a close that has not completed; called periodically."""


class RailLink:
    """The packets to and from one peer."""

    def __init__(self, peer: int, tiers: Sequence[Sequence[int]], matcher: TagMatcher, timeout: float) -> None:
        """Start without a path; `tiers` are rail numbers, the preferred ones first."""
        self.peer, self._tiers, self._matcher, self._timeout = peer, tiers, matcher, timeout
        rails = sum(len(tier) for tier in tiers)
        self.paths: dict[int, Path] = {}
        self.abandoned = [0] * rails
        """For each rail, the last generation that was given up."""
        self.closing: dict[Path, float] = {}
        """Paths that were given up and have not closed yet, and since when."""
        self._sender: SendSequence[Outgoing] = SendSequence()
        self._receiver: ReceiveSequence[tuple[PacketHeader, Payload, int]] = ReceiveSequence()
        self._queue: deque[Outgoing] = deque()
        self._in_use: frozenset[int] = frozenset()
        self._last_acked = 0
        """The last acknowledgement sent to the peer."""
        self.disconnected_since = time.monotonic()
        """Since when there is no path, if there is none."""
        self.peer_left = False
        self._failovers = _FailoverLog(peer, rails)
        self.on_path_down: Callable[[RailLink, int, str], None] = lambda link, rail, why: None

    # Sending

    def post(self, item: Outgoing) -> None:
        """Send a packet in sequence, ahead of the segments of messages."""
        self._queue.append(item)
        if item.kind in (RTS, EAGER, CONTROL):
            self._select_rails()
        self.wake()

    def wake(self) -> None:
        """Schedule a flush of the paths in use."""
        for rail in self._in_use:
            self.paths[rail].wake()

    def next_packet(self, path: Path) -> tuple[bytes, Payload] | None:
        """Return header and payload of the next packet for a path to send."""
        if path.urgent:
            kind, payload = path.urgent.popleft()
            return self._header(kind, payload, 0), payload
        if path.id.rail not in self._in_use or self.paths[path.id.rail] is not path:
            return None
        taken = self._sender.take(path.id)
        if taken is None:
            item = self._queue.popleft() if self._queue else self._matcher.next_segment(self.peer)
            if item is None:
                return None
            self._sender.post(item)
            taken = self._sender.take(path.id)
            assert taken is not None
        number, item = taken
        self._matcher.on_sent(item, path.id.rail)
        return self._header(item.kind, item.payload, number, item.message, item.offset), item.payload

    def _header(self, kind: int, payload: Payload, number: int, message: int = 0, offset: int = 0) -> bytes:
        self._last_acked = self._receiver.delivered
        return PacketHeader(kind, len(payload), number, self._last_acked, message, offset).pack()

    @property
    def busy(self) -> bool:
        """Return True if anything is queued, unacked or expected."""
        return bool(self._queue) or not self._sender.all_acked or self._matcher.is_receiving(self.peer)

    @property
    def all_acked(self) -> bool:
        """Return True if everything posted has arrived."""
        return not self._queue and self._sender.all_acked

    # Receiving

    def accept(self, path: Path, header: PacketHeader) -> memoryview | None:
        """Return the buffer for the payload of a packet that begins to arrive; None to discard it."""
        if not header.in_sequence:
            return memoryview(bytearray(header.length))
        if not self._receiver.begin(header.sequence, path.id):
            return None
        buffer = self._matcher.segment_buffer(self.peer, header) if header.kind == DATA else None
        return buffer if buffer is not None else memoryview(bytearray(header.length))

    def on_packet(self, path: Path, header: PacketHeader, payload: Payload | None) -> None:
        """Handle a packet that has arrived; a discarded one has no payload."""
        for item in self._sender.ack(header.acked):
            self._matcher.on_acked(item)
        if not header.in_sequence:
            self._on_urgent(path, header, bytes(payload or b""))
        elif payload is not None:
            if header.kind == DATA:
                self._matcher.on_segment(self.peer, header, path.id.rail)
            whole = None if header.kind == DATA else (header, payload, path.id.rail)
            for one in self._receiver.finish(header.sequence, whole):
                self._deliver(*one)

    def _on_urgent(self, path: Path, header: PacketHeader, payload: bytes) -> None:
        if header.kind == PING:
            path.send_urgent(ACK)
        elif header.kind == STATE:
            state = AckState.unpack(payload, len(self.abandoned))
            if state is not None:
                self._resume(state)

    def _deliver(self, header: PacketHeader, payload: Payload, rail: int) -> None:
        if header.kind == BYE:
            self.peer_left = True
        self._matcher.on_packet(self.peer, header, payload, rail)

    def send_ack(self, path: Path) -> None:
        """Acknowledge what has arrived, unless a packet sent meanwhile has done so."""
        if self._receiver.delivered > self._last_acked and self.paths.get(path.id.rail) is path:
            self._last_acked = self._receiver.delivered
            path.send_urgent(ACK)

    # Paths

    def add_path(self, path: Path) -> None:
        """Use a new path; an existing one on its rail is older and is dropped."""
        rail = path.id.rail
        if rail in self.paths:
            self.drop_path(self.paths[rail], "replaced by a new connection of the peer")
        self.paths[rail] = path
        path.send_urgent(STATE, self._receiver.ack_state(self.closed).pack())
        if not self._in_use:
            self._select_rails()
        self.wake()

    def drop_path(self, path: Path, reason: str) -> None:
        """Give a path up; the peer is informed when it has closed."""
        rail, now = path.id.rail, time.monotonic()
        if self.paths.get(rail) is not path:
            return
        last_seen = path.last_seen(now)
        del self.paths[rail]
        if not self.paths:
            self.disconnected_since = now
        self._select_rails()
        if not self.peer_left:
            self._failovers.add(path.id, reason, last_seen, now)
            self.on_path_down(self, rail, reason)
        self._close(path, now)
        self.wake()

    def _close(self, path: Path, now: float) -> None:
        self.abandoned[path.id.rail] = path.id.generation
        self.closing[path] = now
        self._sender.hold(path.id)
        path.close(lambda: self._on_closed(path))

    def _on_closed(self, path: Path) -> None:
        """Report our state on all paths, and continue with the packets of the closed one."""
        del self.closing[path]
        self._receiver.drop_partial(lambda path_id: path_id == path.id)
        for other in self.paths.values():
            other.send_urgent(STATE, self._receiver.ack_state(self.closed).pack())
        for item in self._sender.release(path.id):
            self._matcher.on_acked(item)
        self._failovers.resolve(self.closed, time.monotonic())
        self.wake()

    def close(self) -> None:
        """Close all paths; `closing` holds those that have not closed yet."""
        paths, self.paths, self._in_use = self.paths, {}, frozenset()
        for path in paths.values():
            self._close(path, time.monotonic())

    def _resume(self, state: AckState) -> None:
        """Continue from the peer's state; drop the paths that it has closed."""
        for rail, generation in enumerate(state.closed):
            path = self.paths.get(rail)
            if path is not None and path.id.generation <= generation:
                self.drop_path(path, "closed by the peer")
        for item in self._sender.resume(state):
            self._matcher.on_acked(item)
        self._failovers.on_peer_closed(state.closed)
        self._failovers.resolve(self.closed, time.monotonic())
        self.wake()

    @property
    def closed(self) -> tuple[int, ...]:
        """For each rail, return the last generation up to which all paths have closed."""
        last = list(self.abandoned)
        for path in self.closing:
            last[path.id.rail] = min(last[path.id.rail], path.id.generation - 1)
        return tuple(last)

    @property
    def failovers(self) -> list[Failover]:
        """Return the paths that were lost so far."""
        return self._failovers.all

    def _select_rails(self) -> None:
        """Use the best tier with a live path; paths that replace broken ones must be stable first."""
        stable = {rail for rail, path in self.paths.items() if rail in self._in_use or self._is_stable(path)}
        for rails in (stable, self.paths.keys()):
            alive = (frozenset(tier) & rails for tier in self._tiers)
            self._in_use = next((some for some in alive if some), frozenset())
            if self._in_use:
                return

    @property
    def in_use(self) -> list[int]:
        """Return the rails that carry the traffic now."""
        return sorted(self._in_use)

    @property
    def down(self) -> set[int]:
        """Return the rails without a path, and those of the first tier that are not in use."""
        return (set(range(len(self.abandoned))) - self.paths.keys()) | (set(self._tiers[0]) - self._in_use)

    def _is_stable(self, path: Path) -> bool:
        return path.id.generation == 1 or time.monotonic() - path.since > self._timeout

    def check_paths(self, now: float) -> None:
        """Probe silent paths, and drop dead ones."""
        busy = self.busy
        if not busy:
            self._select_rails()
        for path in list(self.closing):
            path.poll_close()
        for path in list(self.paths.values()):
            fault = path.fault()
            liveness = check_liveness(now, path.last_seen(now), path.probed, self._timeout, busy=busy)
            if fault is not None:
                self.drop_path(path, fault)
            elif liveness == SUSPECT:
                path.probed = now
                path.send_urgent(PING)
            elif liveness == DEAD:
                self.drop_path(path, f"no sign of life for {now - path.last_seen(now):.2f} s")
