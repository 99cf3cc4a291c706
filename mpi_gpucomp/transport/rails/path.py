"""What a path is: one connection to a peer on one rail, in order and reliable as long as it lasts."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.transport.rails.frames import Payload
    from mpi_gpucomp.transport.rails.pointers import Key

__all__ = ["Path"]


class Path(ABC):
    """A connection: it asks its link for frames to send, and hands it those that arrive."""

    def __init__(self, key: Key) -> None:
        """Be the path of this rail and generation."""
        self.key = key
        self.urgent: deque[tuple[int, Payload]] = deque()
        """What goes ahead of everything else: kind and payload of frames out of sequence."""
        self.asked = 0.0
        """When it was asked for a sign of life last."""
        self.since = time.monotonic()
        """When it was made."""

    def urge(self, kind: int, payload: Payload = b"") -> None:
        """Send a frame out of sequence as soon as can be."""
        self.urgent.append((kind, payload))
        self.wake()

    @abstractmethod
    def wake(self) -> None:
        """Take notice that the link has something to send; nothing is sent before the caller is through."""

    @abstractmethod
    def heard(self, now: float) -> float:
        """Return when there was a sign of life last."""

    @abstractmethod
    def fault(self) -> str | None:
        """Say why it cannot work, if this end knows: its device has no carrier."""

    @abstractmethod
    def close(self, quiet: Callable[[], None]) -> None:
        """Let go of the connection, and hand on nothing more.

        Call `quiet` once, now or later: when nothing can be written to the callers' memory any more, nor read from it.
        """

    def fade(self) -> None:  # noqa: B027
        """Go on with that, if it is not over yet: called now and then."""
