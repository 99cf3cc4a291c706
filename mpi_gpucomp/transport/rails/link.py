"""All that goes to one peer and comes from it, on whichever paths there are.

Paths stand in tiers: those of the first tier that has a living one carry what is sent, the others wait. What breaks is
given up by both ends, who tell each other what they have over a path that is left, or over the next one. A path may
need a while until it neither writes to the callers' memory nor reads from it; nobody speaks of it as given up before.
A path that is better than those in use is taken when the next message begins: what is under way stays where it is.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mpi_gpucomp.transport.rails.frames import ACK, ANNOUNCE, BYE, DATA, EAGER, LETTER, PING, STATE, Header, Item
from mpi_gpucomp.transport.rails.sequence import Have, Receiver, Sender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi_gpucomp.transport.rails.frames import Payload
    from mpi_gpucomp.transport.rails.sequence import Key

__all__ = ["DEAD", "FINE", "IDLE_SECONDS", "QUIET", "Failover", "Losses", "Path", "RailLink", "Traffic", "judge"]


# The paths that a link has lost, and how long it took until both ends had agreed where to go on.


class Failover(NamedTuple):
    """A path that was lost, and what that cost."""

    peer: int
    rail: int
    reason: str
    quiet: float
    """Seconds from the last sign of life to when it was given up."""
    lost: float | None
    """Seconds from the last sign of life to when the peers had agreed where to go on; None if they have not yet."""


class Losses:
    """The list of them, for one link."""

    def __init__(self, peer: int, rails: int) -> None:
        """Begin with none."""
        self.peer, self.all = peer, list[Failover]()
        self._theirs = [0] * rails
        """For each rail, the last generation that the peer is known to have given up."""
        self._open: dict[int, tuple[Key, float]] = {}

    def add(self, path: Key, reason: str, heard: float, now: float) -> None:
        """Add a path, given up now, with the time of its last sign of life."""
        self._open[len(self.all)] = path, heard
        self.all.append(Failover(self.peer, path.rail, reason, now - heard, None))

    def hear(self, dead: Sequence[int]) -> None:
        """Take notice of what the peer has given up."""
        self._theirs = list(map(max, self._theirs, dead))

    def settle(self, dead: Sequence[int], now: float) -> None:
        """Close the books on those that are given up here (`dead`) and there."""
        for number, (path, heard) in list(self._open.items()):
            if path.generation <= min(dead[path.rail], self._theirs[path.rail]):
                self.all[number] = self.all[number]._replace(lost=now - heard)
                del self._open[number]


# Tells a path that is dead from a peer that has nothing to say.
#
# A path that is quiet is asked. A question that reaches the peer's kernel is a sign of life, whatever the peer
# itself is
# busy with. One that does not get there in time means that the path is dead.

FINE, QUIET, DEAD = "fine", "quiet", "dead"
ASK_AFTER = 0.25
"""The share of the timeout after which a path is asked; the rest is for the answer."""
IDLE_SECONDS = 5.0
"""How long a path may be quiet that nobody waits for."""


def judge(now: float, heard: float, asked: float, timeout: float, *, busy: bool) -> str:
    """Return FINE, QUIET (ask now) or DEAD, by when something was heard and asked last."""
    if asked > heard:
        return DEAD if now - asked > timeout * (1 - ASK_AFTER) else FINE
    patience = timeout * ASK_AFTER if busy else max(timeout, IDLE_SECONDS)
    return QUIET if now - heard > patience else FINE


class RailLink:
    """The way to one peer."""

    def __init__(self, peer: int, tiers: Sequence[Sequence[int]], traffic: Traffic, timeout: float) -> None:
        """Have no path yet; `tiers` are numbers of rails, those to be used first in front."""
        self.peer, self._tiers, self._traffic, self._timeout = peer, tiers, traffic, timeout
        rails = sum(len(tier) for tier in tiers)
        self.paths: dict[int, Path] = {}
        self.given_up = [0] * rails
        """For each rail, the last generation that was given up."""
        self.fading: dict[Path, float] = {}
        """Paths that are given up and not quiet yet, and since when."""
        self._sender: Sender[Item] = Sender()
        self._receiver: Receiver[tuple[Header, Payload, int]] = Receiver()
        self._line: deque[Item] = deque()
        self._in_use: frozenset[int] = frozenset()
        self._told = 0
        """What the peer knows to have arrived."""
        self.bare_since = time.monotonic()
        """Since when there is no path, if there is none."""
        self.peer_left = False
        self._losses = Losses(peer, rails)
        self.when_down: Callable[[RailLink, int, str], None] = lambda link, rail, why: None

    # What is sent

    def post(self, item: Item) -> None:
        """Send something in sequence, ahead of the pieces of messages."""
        self._line.append(item)
        if item.kind in (ANNOUNCE, EAGER, LETTER):
            self._choose()
        self.wake()

    def wake(self) -> None:
        """Let the paths in use look for something to send."""
        for rail in self._in_use:
            self.paths[rail].wake()

    def next(self, path: Path) -> tuple[bytes, Payload] | None:
        """Return header and payload of what a path is to send now."""
        if path.urgent:
            kind, payload = path.urgent.popleft()
            return self._header(kind, payload, 0), payload
        if path.key.rail not in self._in_use or self.paths[path.key.rail] is not path:
            return None
        taken = self._sender.take(path.key)
        if taken is None:
            item = self._line.popleft() if self._line else self._traffic.draw(self.peer)
            if item is None:
                return None
            self._sender.post(item)
            taken = self._sender.take(path.key)
            assert taken is not None
        number, item = taken
        self._traffic.left(item, path.key.rail)
        return self._header(item.kind, item.payload, number, item.message, item.offset), item.payload

    def _header(self, kind: int, payload: Payload, number: int, message: int = 0, offset: int = 0) -> bytes:
        self._told = self._receiver.done
        return Header(kind, len(payload), number, self._told, message, offset).pack()

    @property
    def busy(self) -> bool:
        """Say whether somebody waits for something to get through."""
        return bool(self._line) or not self._sender.all_acked or self._traffic.expects(self.peer)

    @property
    def all_acked(self) -> bool:
        """Say whether all that was posted has arrived."""
        return not self._line and self._sender.all_acked

    # What arrives

    def accept(self, path: Path, header: Header) -> memoryview | None:
        """Return where the payload of a frame goes, which begins to arrive; None to throw it away."""
        if not header.in_sequence:
            return memoryview(bytearray(header.length))
        if not self._receiver.begin(header.sequence, path.key):
            return None
        room = self._traffic.room(self.peer, header) if header.kind == DATA else None
        return room if room is not None else memoryview(bytearray(header.length))

    def take(self, path: Path, header: Header, payload: Payload | None) -> None:
        """Take a frame that has arrived as a whole; what was thrown away has no payload."""
        for item in self._sender.ack(header.acked):
            self._traffic.arrived(item)
        if not header.in_sequence:
            self._take_note(path, header, bytes(payload or b""))
        elif payload is not None:
            if header.kind == DATA:
                self._traffic.landed(self.peer, header, path.key.rail)
            whole = None if header.kind == DATA else (header, payload, path.key.rail)
            for one in self._receiver.finish(header.sequence, whole):
                self._hear(*one)

    def _take_note(self, path: Path, header: Header, payload: bytes) -> None:
        if header.kind == PING:
            path.urge(ACK)
        elif header.kind == STATE:
            have = Have.read(payload, len(self.given_up))
            if have is not None:
                self._resume(have)

    def _hear(self, header: Header, payload: Payload, rail: int) -> None:
        if header.kind == BYE:
            self.peer_left = True
        self._traffic.heard(self.peer, header, payload, rail)

    def answer(self, path: Path) -> None:
        """Let the peer know what has arrived, unless something that was sent has said so."""
        if self._receiver.done > self._told and self.paths.get(path.key.rail) is path:
            self._told = self._receiver.done
            path.urge(ACK)

    # Paths that come and go

    def up(self, path: Path) -> None:
        """Use a path from now on; whatever was there on its rail is older."""
        rail = path.key.rail
        if rail in self.paths:
            self.down(self.paths[rail], "the peer has made a new one")
        self.paths[rail] = path
        path.urge(STATE, self._receiver.have(self.dead).pack())
        if not self._in_use:
            self._choose()
        self.wake()

    def down(self, path: Path, reason: str) -> None:
        """Give a path up; the peer hears of it when the path is quiet."""
        rail, now = path.key.rail, time.monotonic()
        if self.paths.get(rail) is not path:
            return
        heard = path.heard(now)
        del self.paths[rail]
        if not self.paths:
            self.bare_since = now
        self._choose()
        if not self.peer_left:
            self._losses.add(path.key, reason, heard, now)
            self.when_down(self, rail, reason)
        self._close(path, now)
        self.wake()

    def _close(self, path: Path, now: float) -> None:
        self.given_up[path.key.rail] = path.key.generation
        self.fading[path] = now
        self._sender.hold(path.key)
        path.close(lambda: self._quiet(path))

    def _quiet(self, path: Path) -> None:
        """Tell the peer on all paths what is here, and go on with what the quiet one was given."""
        del self.fading[path]
        self._receiver.lose(lambda key: key == path.key)
        for other in self.paths.values():
            other.urge(STATE, self._receiver.have(self.dead).pack())
        for item in self._sender.release(path.key):
            self._traffic.arrived(item)
        self._losses.settle(self.dead, time.monotonic())
        self.wake()

    def close(self) -> None:
        """Let go of all paths; `fading` are those that are not quiet yet."""
        paths, self.paths, self._in_use = self.paths, {}, frozenset()
        for path in paths.values():
            self._close(path, time.monotonic())

    def _resume(self, have: Have) -> None:
        """Go on from where the peer says; give up what it has given up."""
        for rail, generation in enumerate(have.dead):
            path = self.paths.get(rail)
            if path is not None and path.key.generation <= generation:
                self.down(path, "the peer has given it up")
        for item in self._sender.resume(have):
            self._traffic.arrived(item)
        self._losses.hear(have.dead)
        self._losses.settle(self.dead, time.monotonic())
        self.wake()

    @property
    def dead(self) -> tuple[int, ...]:
        """For each rail, return the last generation up to which all paths are given up and quiet."""
        last = list(self.given_up)
        for path in self.fading:
            last[path.key.rail] = min(last[path.key.rail], path.key.generation - 1)
        return tuple(last)

    @property
    def failovers(self) -> list[Failover]:
        """Return the paths that were lost so far."""
        return self._losses.all

    def _choose(self) -> None:
        """Use the best paths that there are, those that have broken before only once they have held for a while."""
        steady = {rail for rail, path in self.paths.items() if rail in self._in_use or self._holds(path)}
        for rails in (steady, self.paths.keys()):
            alive = (frozenset(tier) & rails for tier in self._tiers)
            self._in_use = next((some for some in alive if some), frozenset())
            if self._in_use:
                return

    @property
    def in_use(self) -> list[int]:
        """Return the rails that carry what is sent now."""
        return sorted(self._in_use)

    @property
    def missing(self) -> set[int]:
        """Return the rails that there is no path on, and those of the first tier that are not in use."""
        return (set(range(len(self.given_up))) - self.paths.keys()) | (set(self._tiers[0]) - self._in_use)

    def _holds(self, path: Path) -> bool:
        return path.key.generation == 1 or time.monotonic() - path.since > self._timeout

    def look(self, now: float) -> None:
        """Ask paths that are quiet, and give up those that are dead."""
        busy = self.busy
        if not busy:
            self._choose()
        for path in list(self.fading):
            path.fade()
        for path in list(self.paths.values()):
            fault = path.fault()
            verdict = judge(now, path.heard(now), path.asked, self._timeout, busy=busy)
            if fault is not None:
                self.down(path, fault)
            elif verdict == QUIET:
                path.asked = now
                path.urge(PING)
            elif verdict == DEAD:
                self.down(path, f"nothing heard for {now - path.heard(now):.2f} s")


# What a link carries, as the link sees it.


class Traffic(Protocol):
    """What a link carries, as it needs to know it."""

    def draw(self, peer: int) -> Item | None:
        """Return the next piece of a message that a peer has room for."""
        ...

    def room(self, peer: int, header: Header) -> memoryview | None:
        """Return where a piece of a message goes; None for one that nobody has asked for."""
        ...

    def landed(self, peer: int, header: Header, rail: int) -> None:
        """Take notice that a piece is there, and of the rail that it took."""
        ...

    def heard(self, peer: int, header: Header, payload: Payload, rail: int) -> None:
        """Take what has arrived in its turn."""
        ...

    def left(self, item: Item, rail: int) -> None:
        """Take notice of the rail that something takes."""
        ...

    def arrived(self, item: Item) -> None:
        """Take notice that the peer has something that was sent."""
        ...

    def expects(self, peer: int) -> bool:
        """Say whether pieces of a message are to come from a peer."""
        ...


# What a path is: one connection to a peer on one rail, in order and reliable as long as it lasts.


class Path(ABC):
    """A connection: it asks its link for frames to send, and hands it those that arrive."""

    def __init__(self, key: Key) -> None:
        """Be the path of this rail and generation."""
        self.key = key
        self.urgent: deque[tuple[int, Payload]] = deque()
        """What goes ahead of everything else: kind and payload of frames out of sequence."""
        self.asked = 0.0
        """When it was asked for a sign of life last."""
        self.since = time.monotonic()
        """When it was made."""

    def urge(self, kind: int, payload: Payload = b"") -> None:
        """Send a frame out of sequence as soon as can be."""
        self.urgent.append((kind, payload))
        self.wake()

    @abstractmethod
    def wake(self) -> None:
        """Take notice that the link has something to send; nothing is sent before the caller is through."""

    @abstractmethod
    def heard(self, now: float) -> float:
        """Return when there was a sign of life last."""

    @abstractmethod
    def fault(self) -> str | None:
        """Say why it cannot work, if this end knows: its device has no carrier."""

    @abstractmethod
    def close(self, quiet: Callable[[], None]) -> None:
        """Let go of the connection, and hand on nothing more.

        Call `quiet` once, now or later: when nothing can be written to the callers' memory any more, nor read from it.
        """

    def fade(self) -> None:  # noqa: B027
        """Go on with that, if it is not over yet: called now and then."""
