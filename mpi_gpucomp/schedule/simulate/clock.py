"""The time of a simulation: what is to happen when, in order."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Clock"]


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
