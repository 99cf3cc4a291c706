"""The paths that a link has lost, and how long it took until both ends had agreed where to go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.transport.rails.pointers import Key

__all__ = ["Failover", "Losses"]


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
