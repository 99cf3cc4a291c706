"""How far the two ends of a link have come: what was sent, what has arrived, and from where to go on.

A link has one sequence of frames each way, whatever paths they take. The sender's pointers are posted >= transmitted >=
acked; it keeps what is not acked. The receiver's are received >= done: what is below `done` was handed on, in turn, and
is acked. A path that breaks takes with it what was on its way. The sender does not guess what that was: it waits until
the receiver has given that path up too, and says what it has (`Have`). What it does not have is sent again, once the
path itself has let go of the memory that it was sent from.
"""

from __future__ import annotations

import heapq
import struct
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Have", "Key", "Receiver", "Sender"]

T = TypeVar("T")
_NUMBER = struct.Struct("<Q")


class Key(NamedTuple):
    """A path: its rail, and how many there have been on that rail."""

    rail: int
    generation: int


class Have(NamedTuple):
    """What a receiver has, once it has given up all paths of a rail up to a generation."""

    done: int
    beyond: tuple[int, ...]
    """What has arrived ahead of its turn."""
    dead: tuple[int, ...]
    """For each rail, the last generation that is given up."""

    def pack(self) -> bytes:
        """Return its bytes."""
        numbers = (self.done, len(self.dead), *self.dead, *self.beyond)
        return struct.pack(f"<{len(numbers)}Q", *numbers)

    @classmethod
    def read(cls, data: bytes, rails: int) -> Have | None:
        """Read what `pack` has made for so many rails; None if it cannot be that."""
        if len(data) % _NUMBER.size or len(data) < (2 + rails) * _NUMBER.size:
            return None
        done, count, *rest = (number for (number,) in _NUMBER.iter_unpack(data))
        return cls(done, tuple(rest[rails:]), tuple(rest[:rails])) if count == rails else None


class Sender(Generic[T]):
    """The pointers of the end that sends, and what it keeps."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.posted = self.transmitted = self.acked = 0
        self._kept: dict[int, T] = {}
        self._on: dict[int, Key | None] = {}
        """The path that each was given to; None where it is known to have arrived."""
        self._again: list[int] = []
        self._done = 0
        """What the receiver is known to have."""
        self._held: dict[Key, Have | None] = {}
        """Paths that may still read what they were given, and the receiver's word on them, if it has come."""

    def post(self, item: T) -> int:
        """Add to the end of the sequence."""
        number = self.posted
        self._kept[number] = item
        self.posted += 1
        return number

    def take(self, path: Key) -> tuple[int, T] | None:
        """Return what a path is to send next: first what was lost elsewhere."""
        while self._again:
            number = heapq.heappop(self._again)
            if number in self._kept:
                self._on[number] = path
                return number, self._kept[number]
        if self.transmitted == self.posted:
            return None
        number, self.transmitted = self.transmitted, self.transmitted + 1
        self._on[number] = path
        return number, self._kept[number]

    def ack(self, done: int) -> list[T]:
        """Let go of what has arrived, and return it; not beyond what a path may still read."""
        over = []
        self._done = max(self._done, done)
        while self.acked < min(self._done, self.transmitted) and self._on.get(self.acked) not in self._held:
            over.append(self._kept.pop(self.acked))
            self._on.pop(self.acked, None)
            self.acked += 1
        return over

    def resume(self, have: Have) -> list[T]:
        """Send again what was lost with the paths that the receiver has given up; return what has arrived."""
        over = self.ack(have.done)
        arrived = set(have.beyond)
        self._held.update({path: have for path in self._held if path.generation <= have.dead[path.rail]})
        for number, path in self._on.items():
            if path is not None and path not in self._held and path.generation <= have.dead[path.rail]:
                self._on[number] = None
                if number not in arrived:
                    heapq.heappush(self._again, number)
        return over

    def hold(self, path: Key) -> None:
        """Keep what a path was given, which is given up, until it is released."""
        self._held[path] = None

    def release(self, path: Key) -> list[T]:
        """Go on with what a path was given, which reads nothing any more; return what has arrived."""
        have = self._held.pop(path)
        return self.ack(self._done) if have is None else self.resume(have)

    @property
    def all_acked(self) -> bool:
        """Say whether everything has arrived."""
        return self.acked == self.posted


class Receiver(Generic[T]):
    """The pointers of the end that receives, and what waits for its turn."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.received = self.done = 0
        self._beyond: dict[int, T | None] = {}
        self._coming: dict[int, Key] = {}

    def begin(self, number: int, path: Key) -> bool:
        """Say whether to take what begins to arrive on a path; not if it is here already."""
        if number < self.done or number in self._beyond or number in self._coming:
            return False
        self._coming[number] = path
        return True

    def finish(self, number: int, item: T | None) -> list[T]:
        """Take what has arrived as a whole; return what has its turn now. What needs no turn is None."""
        del self._coming[number]
        self._beyond[number] = item
        self.received = max(self.received, number + 1)
        ready = []
        while self.done in self._beyond:
            waited = self._beyond.pop(self.done)
            self.done += 1
            if waited is not None:
                ready.append(waited)
        return ready

    def lose(self, lost: Callable[[Key], bool]) -> None:
        """Forget what had only begun to arrive on paths that are given up."""
        self._coming = {number: path for number, path in self._coming.items() if not lost(path)}

    def have(self, dead: tuple[int, ...]) -> Have:
        """Say what is here."""
        return Have(self.done, tuple(self._beyond), dead)
