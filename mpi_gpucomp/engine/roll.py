"""Who has joined which call, and what they said of it.

A *call* is one run of a collective, the same on all ranks: the third run of "grad.3", or the seventeenth collective
without a name. A rank that starts one tells its neighbours what it is about to do and on which tag it listens. So
nobody sends before the other side is there, every two neighbours compare what they say, and tags need no agreement:
each rank gives its own.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

__all__ = ["Call", "Joined", "Past", "Roll"]

REMEMBERED = 256
"""Finished calls that are kept in mind, for ranks that ask about them when theirs have failed."""


class Call(NamedTuple):
    """One run of a collective; those without a name are counted together, under the empty one."""

    name: str
    run: int


class Joined(NamedTuple):
    """What a peer says when it joins a call: what it is about to do, and the first of the tags it listens on."""

    said: str
    tag: int
    longest: int = 0
    """The length of the longest block that it knows of."""
    trace: int = 0
    """A number made of all calls that went straight to MPI before this one: ranks that differ have lost each other."""


class Past(NamedTuple):
    """What this rank did in a call that is over: what it said, and the messages it sent by peer and channel."""

    said: str
    sent: Counter[tuple[int, int]]
    trace: int | None = 0
    """None if it is not known any more."""


class Roll:
    """The calls that this rank has begun, and what it has heard of those of others."""

    def __init__(self) -> None:
        """Start with none."""
        self._begun: Counter[str] = Counter()
        self._heard: dict[Call, dict[int, Joined]] = {}
        self._past: OrderedDict[Call, Past] = OrderedDict()

    def begin(self, name: str) -> Call:
        """Count the next run of a name."""
        self._begun[name] += 1
        return Call(name, self._begun[name])

    def begun(self, call: Call) -> bool:
        """Say whether this rank has started the call."""
        return call.run <= self._begun[call.name]

    @property
    def runs(self) -> dict[str, int]:
        """Return how often each name was begun."""
        return dict(self._begun)

    def hear(self, call: Call, peer: int, joined: Joined) -> None:
        """Keep what a peer says."""
        self._heard.setdefault(call, {})[peer] = joined

    def heard(self, call: Call) -> dict[int, Joined]:
        """Return the peers that have joined a call, as far as they have said so here."""
        return self._heard.get(call, {})

    def end(self, call: Call, past: Past) -> None:
        """Put a call that is over away."""
        self._heard.pop(call, None)
        self._past[call] = past
        if len(self._past) > REMEMBERED:
            self._past.popitem(last=False)

    def past(self, call: Call) -> Past:
        """Return what is still known of a call that is over."""
        return self._past.get(call, Past("something that is forgotten", Counter(), None))
