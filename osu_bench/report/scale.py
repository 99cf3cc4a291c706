"""Logarithmic axes: where a value lies, and which values get a label."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Axis", "axis", "round_values", "thinned"]

FEW_DECADES, SOME_DECADES = 1.6, 3.2
STEPS = ((1, 2, 5), (1, 3), (1,))
"""The figures that ticks begin with: the more decades, the fewer."""


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis from `low` at place `start` to `high` at place `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def axis(values: Sequence[float], start: float, end: float, margin: float) -> Axis:
    """Make an axis for these values, with some room around them as a factor."""
    low, high = min(values), max(values)
    room = margin if high > low else 2 * margin
    return Axis(low / room, high * room, start, end)


def round_values(low: float, high: float) -> list[float]:
    """Return the round numbers between two values, a handful of them."""
    decades = math.log10(high / low)
    steps = STEPS[0 if decades <= FEW_DECADES else 1 if decades <= SOME_DECADES else 2]
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [value for power in powers for step in steps if low <= (value := step * 10.0**power) <= high]


def thinned(values: Sequence[int], most: int) -> list[int]:
    """Leave out values at even distances until at most so many are left, and keep the last."""
    step = -(-len(values) // most)
    return list(values[::-1][::step][::-1])
