"""Finds the fastest of several ways by taking them in turns, in calls that have to be made anyway."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Trial"]

Way = TypeVar("Way")

KEPT = (3.0, 1.5, 1.25, 1.2, 1.15, 1.1, 1.1)
KEPT_LONGER = (4.0, 3.0, 2.0, 1.5, 1.3, 1.2, 1.15, 1.1, 1.1)
"""How many times the least cost a way may have after each round to be tried again; after one more the best is taken.

Calls that are short cost little to try, and differ more from one time to the next.
"""


class Trial(Generic[Way]):
    """The ways of one kind of call; all ranks have the same, in the same order, and make the same calls."""

    def __init__(self, ways: Sequence[Way], *, short: bool = False) -> None:
        """Begin with the way that is expected to be the best; calls that are `short` are tried more often."""
        self._kept = KEPT_LONGER if short else KEPT
        self._ways, self._left = tuple(ways), list(range(len(ways)))
        self._costs: list[list[float]] = [[] for _ in ways]
        self._noted: list[float] = []
        self._round = 0

    @property
    def settled(self) -> bool:
        """Say whether the best way is known."""
        return len(self._left) == 1

    @property
    def way(self) -> Way:
        """The way to take now."""
        return self._ways[self._left[0 if self.settled else len(self._noted)]]

    @property
    def place(self) -> str:
        """Where it stands, for ranks to compare."""
        return f"try {len(self._noted)} of round {self._round}"

    def begin(self, agreed: Callable[[list[float]], list[float]]) -> None:
        """Look back if a round is over: `agreed` returns the largest of each number among the ranks."""
        if len(self._noted) < len(self._left) or self.settled:
            return
        for way, cost in zip(self._left, agreed(self._noted), strict=True):
            self._costs[way].append(cost)
        costs = {way: _usual(self._costs[way]) for way in self._left}
        least = min(self._left, key=costs.__getitem__)
        kept = self._kept[self._round] if self._round < len(self._kept) else 0.0
        self._left = [way for way in self._left if way == least or costs[way] <= kept * costs[least]]
        self._noted, self._round = [], self._round + 1

    def note(self, cost: float) -> None:
        """Take down what the call has cost this rank."""
        if not self.settled:
            self._noted.append(cost)


def _usual(costs: list[float]) -> float:
    """Return what a way usually costs; in its first round it may have had connections to make."""
    return median(costs[1:] or costs)
