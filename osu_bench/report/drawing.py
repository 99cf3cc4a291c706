"""Drawing shared by charts and plots: logarithmic axes, and the colour and marker of each candidate.

The colours are chosen to be distinguishable for colour-blind readers, and markers add to them. They depend only on the
candidate's name, so that reports and plots of different runs can be compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MARKERS", "Axis", "Look", "axis", "look", "round_values", "thinned"]


class Look(NamedTuple):
    """The colours and marker of a candidate."""

    light: str
    """The colour on a light background."""
    dark: str
    """The colour on a dark background."""
    marker: str


MARKERS = {"square": "s", "diamond": "D", "circle": "o", "up": "^", "down": "v", "cross": "X", "pentagon": "p"}
"""Markers and their matplotlib codes."""

FAMILIES = {
    "mpi": ("#1b1b1b", "#f2f2f2"),
    "gloo": ("#8c5a2b", "#cf9f68"),
    "none": ("#00809c", "#4cc9e0"),
    "p2p": ("#d04a00", "#ff8a3d"),
    "zfp": ("#0057c2", "#5a9bff"),
    "bound": ("#b07400", "#f0b429"),
    "split": ("#00805c", "#2fc79a"),
    "auto": ("#b0329f", "#ee82d8"),
}
OTHERS = (("#7a5cc9", "#b39cff"), ("#a3333d", "#ff8b92"), ("#5c7a00", "#b6d84a"), ("#4a6572", "#9db7c2"))
FIXED = {
    "mpi": Look(*FAMILIES["mpi"], "square"),
    "mpi-tuned": Look("#767676", "#a8a8a8", "diamond"),
    "gloo": Look(*FAMILIES["gloo"], "down"),
    "none": Look(*FAMILIES["none"], "circle"),
    "p2p:zfp:rate=8": Look(*FAMILIES["p2p"], "cross"),
    "zfp:rate=4": Look("#5b8def", "#a9c8ff", "down"),
    "zfp:rate=8": Look(*FAMILIES["zfp"], "circle"),
    "zfp:rate=16": Look("#002b6b", "#2f78ea", "up"),
    "bound:abs=2e-4": Look(*FAMILIES["bound"], "pentagon"),
    "split": Look(*FAMILIES["split"], "diamond"),
    "auto": Look(*FAMILIES["auto"], "square"),
}
SHADES = (0.0, 0.2, 0.4)


def look(candidate: str) -> Look:
    """Return the colours and marker of a candidate."""
    if candidate in FIXED:
        return FIXED[candidate]
    drawn = crc32(candidate.encode())
    family = candidate.partition(":")[0]
    light, dark = FAMILIES.get(family) or OTHERS[crc32(family.encode()) % len(OTHERS)]
    shade = SHADES[drawn % len(SHADES)]
    marker = list(MARKERS)[drawn // len(SHADES) % len(MARKERS)]
    return Look(_mixed(light, 0, shade), _mixed(dark, 255, shade), marker)


def _mixed(colour: str, with_grey: int, share: float) -> str:
    """Mix a colour with black or white, away from the background, so that the contrast grows."""
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (with_grey - channel) * share):02x}" for channel in channels)


FEW_DECADES, SOME_DECADES = 1.6, 3.2
STEPS = ((1, 2, 5), (1, 3), (1,))
"""Leading digits of ticks, fewer for more decades."""


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis from `low` at `start` to `high` at `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def axis(values: Sequence[float], start: float, end: float, margin: float) -> Axis:
    """Return an axis for these values, with a margin given as a factor."""
    low, high = min(values), max(values)
    room = margin if high > low else 2 * margin
    return Axis(low / room, high * room, start, end)


def round_values(low: float, high: float) -> list[float]:
    """Return a few round numbers between two values."""
    decades = math.log10(high / low)
    steps = STEPS[0 if decades <= FEW_DECADES else 1 if decades <= SOME_DECADES else 2]
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [value for power in powers for step in steps if low <= (value := step * 10.0**power) <= high]


def thinned(values: Sequence[int], most: int) -> list[int]:
    """Return at most `most` evenly spaced values, including the last."""
    step = -(-len(values) // most)
    return list(values[::-1][::step][::-1])
