"""A call in which nothing moves: it is over as soon as all neighbours have said the same."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mpi_gpucomp.monitor.recorder import OFF, NoLog

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpi_gpucomp.monitor.digest import UnderWay

__all__ = ["CHANNELS", "Meeting"]

CHANNELS = 8
"""Tags that a call may use: one for each channel of its algorithm."""


class Meeting:
    """What ranks submit to compare what they are about to do elsewhere, or to say that they cannot."""

    busy = False
    longest = 0
    neighbours: frozenset[int] = frozenset()

    def __init__(self, name: str, tag: int = 0) -> None:
        """Be about the collective of this name."""
        self.name, self.tag, self.title = name, tag, name
        self.peer_tags: dict[int, int] = {}
        self.sent: Counter[tuple[int, int]] = Counter()
        self.done = False
        self.log: NoLog = OFF

    def prepare(self, longest: int) -> None:
        """Need nothing."""

    def move(self) -> bool:
        """Be done: a job is only moved when its neighbours have joined it."""
        self.done = True
        return True

    def under_way(self) -> list[UnderWay]:
        """Have nothing on the wire."""
        return []

    def suspend(self) -> None:
        """Hold nothing."""

    def abandon(self) -> None:
        """Hold nothing."""

    def halt(self) -> None:
        """Use no buffers."""

    def wind_down(self, owed: Mapping[tuple[int, int], int]) -> bool:
        """Have nothing under way; a peer whose call was another one has sent nothing either."""
        return True
