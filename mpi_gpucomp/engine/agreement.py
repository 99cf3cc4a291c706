"""A call in which nothing moves: it is over as soon as all neighbours have said the same."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.trace import NO_CALL_TRACE, CallTrace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpi_gpucomp.trace import InFlight

__all__ = ["CHANNELS", "AgreementCheck", "CallId", "CallRegistry", "Joined", "Past"]

CHANNELS = 8
"""Tags that a call may use: one for each channel of its algorithm."""


class AgreementCheck:
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
        self.call_trace: CallTrace = NO_CALL_TRACE

    def prepare(self, longest: int) -> None:
        """Need nothing."""

    def move(self) -> bool:
        """Be done: a job is only moved when its neighbours have joined it."""
        self.done = True
        return True

    def in_flight(self) -> list[InFlight]:
        """Have no transfers."""
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


# Who has joined which call, and what they said of it.
#
# A *call* is one run of a collective, the same on all ranks: the third run of "grad.3", or the seventeenth collective
# without a name. A rank that starts one tells its neighbours what it is about to do and on which tag it listens. So
# nobody sends before the other side is there, every two neighbours compare what they say, and tags need no agreement:
# each rank gives its own.

REMEMBERED = 256
"""Finished calls that are kept in mind, for ranks that ask about them when theirs have failed."""


class CallId(NamedTuple):
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


class CallRegistry:
    """The calls that this rank has begun, and what it has heard of those of others."""

    def __init__(self) -> None:
        """Start with none."""
        self._begun: Counter[str] = Counter()
        self._heard: dict[CallId, dict[int, Joined]] = {}
        self._past: OrderedDict[CallId, Past] = OrderedDict()

    def begin(self, name: str) -> CallId:
        """Count the next run of a name."""
        self._begun[name] += 1
        return CallId(name, self._begun[name])

    def begun(self, call: CallId) -> bool:
        """Say whether this rank has started the call."""
        return call.run <= self._begun[call.name]

    @property
    def runs(self) -> dict[str, int]:
        """Return how often each name was begun."""
        return dict(self._begun)

    def hear(self, call: CallId, peer: int, joined: Joined) -> None:
        """Keep what a peer says."""
        self._heard.setdefault(call, {})[peer] = joined

    def heard(self, call: CallId) -> dict[int, Joined]:
        """Return the peers that have joined a call, as far as they have said so here."""
        return self._heard.get(call, {})

    def end(self, call: CallId, past: Past) -> None:
        """Put a call that is over away."""
        self._heard.pop(call, None)
        self._past[call] = past
        if len(self._past) > REMEMBERED:
            self._past.popitem(last=False)

    def past(self, call: CallId) -> Past:
        """Return what is still known of a call that is over."""
        return self._past.get(call, Past("something that is forgotten", Counter(), None))
