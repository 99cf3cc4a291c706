"""How whoever looks again and again at a call of MPI's own rests between two looks."""

from __future__ import annotations

import os
import time

__all__ = ["Patience"]

EAGER_SECONDS = 2e-3
"""How long looks follow each other at once, apart from letting others have the processor: MPI only goes on then."""
SHORTEST_NAP, LONGEST_NAP = 20e-6, 1e-3


class Patience:
    """One wait: eager at first, then with longer and longer naps."""

    def __init__(self) -> None:
        """Begin to wait."""
        self._nap, self._eager_until = SHORTEST_NAP, time.monotonic() + EAGER_SECONDS

    def rest(self) -> None:
        """Rest until the next look."""
        if time.monotonic() < self._eager_until:
            os.sched_yield()
            return
        time.sleep(self._nap)
        self._nap = min(LONGEST_NAP, 1.5 * self._nap)
