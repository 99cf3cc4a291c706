"""Streams of a rank, on which its codec works in order, and its messages are handled, and the cores that they share."""

from __future__ import annotations

from collections import deque
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.simulate.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.schedule.simulate.clock import Clock

__all__ = ["Cores", "Stream", "Work"]


class Work:
    """Something for a stream to do, and who waits for it."""

    __slots__ = ("cause", "done", "ended", "kind", "loop", "nbytes", "number", "seconds", "wake")

    def __init__(self, kind: str, loop: int, nbytes: float, seconds: float, cause: int) -> None:
        """Describe it; `cause` is the record that it follows from."""
        self.kind, self.loop, self.nbytes, self.seconds, self.cause = kind, loop, nbytes, seconds, cause
        self.done, self.number, self.ended = False, -1, 0.0
        self.wake: Callable[[], None] | None = None


class Cores:
    """So many cores, for the streams that ask first."""

    def __init__(self, count: float) -> None:
        """Begin with all of them free; a part of one is a whole one that is slower, as all of them are then."""
        self._free = ceil(count)
        self.slowness = ceil(count) / count
        self._line: deque[Callable[[], None]] = deque()

    def ask(self, begin: Callable[[], None]) -> None:
        """Begin on a core, now or when one is free."""
        if self._free:
            self._free -= 1
            begin()
        else:
            self._line.append(begin)

    def give_back(self) -> None:
        """Let the next one have a core."""
        if self._line:
            self._line.popleft()()
        else:
            self._free += 1


class Stream:
    """The work of a rank, one thing after the other."""

    def __init__(self, clock: Clock, rank: int, records: list[Record], cores: Cores | None) -> None:
        """Work on cores that are shared, or on its own."""
        self._clock, self._rank, self._records, self._cores = clock, rank, records, cores
        self._line: deque[Work] = deque()
        self._last = -1

    def add(self, work: Work) -> Work:
        """Queue some work, and return it."""
        self.queue(work)
        return work

    def queue(self, work: Work) -> None:
        """Queue some work."""
        self._line.append(work)
        if len(self._line) == 1:
            self._next()

    def _next(self) -> None:
        if self._cores is None:
            self._begin()
        else:
            self._cores.ask(self._begin)

    def _begin(self) -> None:
        work, now = self._line[0], self._clock.now
        # What it waited for longest: the work before it on this stream, if that has just ended.
        waited = self._last >= 0 and self._records[self._last].end >= now
        work.number = len(self._records)
        cause = self._last if waited else work.cause
        end = now + work.seconds * (self._cores.slowness if self._cores else 1.0)
        self._records.append(Record(work.kind, self._rank, -1, work.loop, work.nbytes, now, end, cause))
        self._clock.at(end, partial(self._end, work))

    def _end(self, work: Work) -> None:
        self._line.popleft()
        self._last, work.done, work.ended = work.number, True, self._clock.now
        if self._cores is not None:
            self._cores.give_back()
        if self._line:
            self._next()
        if work.wake is not None:
            work.wake()
