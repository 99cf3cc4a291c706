"""How fast a rank encodes and decodes, and how long its calls take, against its own mean in calls of the same sort."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi_gpucomp.monitor.box import ENCODE
from mpi_gpucomp.monitor.link import KNOWN, MOST_SORTS, SLOW, WEIGHT, WINDOW

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Durations", "Pace"]

LEAST_NS = 50_000_000
"""Work of a window below which it is not judged: a slow moment of the machine may take all of less."""
SLOW_CALLS, SLOW_CALLS_NS, KNOWN_CALLS = 3, 300_000_000, 5
"""So many calls of a sort in a row, so long together, that take over twice their mean, once so many have made it."""


class Pace:
    """Bytes over the time that the stream was at work on them, in a sliding window of chunks."""

    def __init__(self) -> None:
        """Start with nothing coded."""
        self.share = 1.0
        """The pace of the last window as a share of the mean, where that is far below it."""
        self._means: dict[int, list[float]] = {}
        self._windows: dict[int, list[tuple[int, int]]] = {}
        """The time that each of the last chunks of a sort took, and its bytes."""
        self._last = 0

    def extend(self, coded: npt.NDArray[Any]) -> None:
        """Take notice of chunks that are coded; the stream does one after the other. See RECORD."""
        newest, touched = coded[-2 * WINDOW :], {}
        if len(newest) == 2 * WINDOW:
            self._last = int(newest["complete"][0])
            newest = newest[1:]
        fields = ("post", "complete", "plain", "sort", "kind")
        for post, complete, plain, sort, kind in zip(*(newest[name].tolist() for name in fields), strict=True):
            key = 2 * sort + (kind == ENCODE)
            window = self._windows.setdefault(key, [])
            window.append((complete - max(post, self._last), plain))
            del window[:-WINDOW]
            self._last, touched[key] = complete, window
        if len(self._windows) > MOST_SORTS:
            self._windows.clear()
        shares = [self._judge(key, window, len(coded)) for key, window in touched.items() if len(window) == WINDOW]
        self.share = min(shares, default=1.0)

    def _judge(self, key: int, window: list[tuple[int, int]], chunks: int) -> float:
        """Return a window's share of the mean, or 1 where there is nothing to say; let it count for those to come."""
        spent = sum(took for took, _ in window)
        pace = sum(plain for _, plain in window) / max(1, spent)
        if len(self._means) >= MOST_SORTS and key not in self._means:
            self._means.clear()
        known = self._means.setdefault(key, [pace, 0])
        if known[1] >= KNOWN and pace < SLOW * known[0]:
            return pace / known[0] if spent > LEAST_NS else 1.0
        known[0] += (pace - known[0]) * min(0.5, WEIGHT * chunks)
        known[1] += chunks
        return 1.0


class Durations:
    """How long calls take, by sort."""

    def __init__(self) -> None:
        """Start with none."""
        self._means: dict[int, list[float]] = {}
        self._row = self._row_ns = 0

    @property
    def slow(self) -> bool:
        """Say whether the last calls took far longer than they used to."""
        return self._row >= SLOW_CALLS and self._row_ns >= SLOW_CALLS_NS

    def complete(self, took: int, sort: int) -> None:
        """Take notice of a call that is over."""
        if len(self._means) >= MOST_SORTS and sort not in self._means:
            self._means.clear()
        known = self._means.setdefault(sort, [took, 0])
        if known[1] >= KNOWN_CALLS and took * SLOW > known[0]:
            self._row, self._row_ns = self._row + 1, self._row_ns + took
            return
        self._row = self._row_ns = 0
        known[1] += 1
        known[0] += (took - known[0]) / min(known[1], 1 / WEIGHT)
