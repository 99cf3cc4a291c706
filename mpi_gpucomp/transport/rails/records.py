"""What is recorded of rails: copies of messages, and lost paths."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Copies", "Failover"]


class Copies(NamedTuple):
    """Copies of messages made within a rank."""

    times: int
    nbytes: int


class Failover(NamedTuple):
    """A path that was lost, and the time it cost."""

    peer: int
    rail: int
    reason: str
    silence: float
    """Seconds from the last sign of life to the detection."""
    downtime: float | None
    """Seconds from the last sign of life until both ends had resynchronised; None if they have not yet."""
