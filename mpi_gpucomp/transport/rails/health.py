"""Tells a path that is dead from a peer that has nothing to say.

A path that is quiet is asked. A question that reaches the peer's kernel is a sign of life, whatever the peer itself is
busy with. One that does not get there in time means that the path is dead.
"""

from __future__ import annotations

__all__ = ["DEAD", "FINE", "IDLE_SECONDS", "QUIET", "judge"]

FINE, QUIET, DEAD = "fine", "quiet", "dead"
ASK_AFTER = 0.25
"""The share of the timeout after which a path is asked; the rest is for the answer."""
IDLE_SECONDS = 5.0
"""How long a path may be quiet that nobody waits for."""


def judge(now: float, heard: float, asked: float, timeout: float, *, busy: bool) -> str:
    """Return FINE, QUIET (ask now) or DEAD, by when something was heard and asked last."""
    if asked > heard:
        return DEAD if now - asked > timeout * (1 - ASK_AFTER) else FINE
    patience = timeout * ASK_AFTER if busy else max(timeout, IDLE_SECONDS)
    return QUIET if now - heard > patience else FINE
