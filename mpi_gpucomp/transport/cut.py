"""How long messages are cut into pieces, and when.

How many pieces follow is said by the length of the first one, so nothing is added to the bytes: up to `Cut.whole` bytes
there is one alone, and `Cut.whole + n` bytes are followed by n others. All of these are full, but the last, which takes
what is left. What is longer than a piece has come whole: the sender decides, and cuts where the wire is slow. On a fast
one the copies that MPI makes of short messages cost more than its questions before long ones.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["MOST", "PIECE", "Cut", "Pace"]

PIECE = (1 << 16) - 256
"""Bytes of a piece: Open MPI sends so much at once over TCP, with its header."""

MOST = 1 << 12
"""Pieces that may follow the first one."""
WINDOW = 8
"""Messages that tell how fast a wire is."""
SLOW = 160e6
"""Bytes a second: up to here a wire counts as slow, such as one of 1 Gbit/s."""


class Cut(NamedTuple):
    """How messages are cut; the same on all ranks."""

    piece: int
    """Bytes of a piece, more than MOST."""

    @property
    def whole(self) -> int:
        """Bytes up to which a message stays whole."""
        return self.piece - MOST

    def first(self, nbytes: int) -> int:
        """Return the bytes of the first piece of a message."""
        beyond = nbytes - self.whole
        return self.whole + min(MOST, -(-beyond // (self.piece + 1))) if beyond > 0 else nbytes

    def following(self, first: int) -> int:
        """Return how many pieces follow what has begun with so many bytes."""
        return max(0, first - self.whole) if first <= self.piece else 0

    def rest(self, first: int, room: int) -> Iterator[tuple[int, int]]:
        """Return where the pieces behind a first one begin and end, of a message that has `room` bytes."""
        following = self.following(first)
        for number in range(following):
            start = first + number * self.piece
            yield start, room if number == following - 1 else start + self.piece


class Pace:
    """How fast messages to one peer have left lately."""

    def __init__(self) -> None:
        """Begin with nothing known."""
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._last = 0.0

    def begin(self, nbytes: int) -> Callable[[], None]:
        """Start to count a message; return what ends it, once.

        It is under way since now, or since the one before it was done.
        """
        posted = perf_counter()

        def end() -> None:
            now = perf_counter()
            self._recent.append(nbytes / (now - max(posted, self._last)))
            self._last = now

        return end

    def slow(self) -> bool:
        """Say whether the wire is so slow that messages are better cut; one that nobody knows yet may be.

        The usual message counts, and not all of them together: some wait for a receiver that has no processor.
        """
        return len(self._recent) < WINDOW or sorted(self._recent)[WINDOW // 2] <= SLOW
