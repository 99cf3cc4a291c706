"""Agreement on calls: which ranks have joined which call, and with what signature.

A *call* is one run of a collective, the same on all ranks: the third run of "grad.3", or the seventeenth collective
without a name. A rank that begins one sends its neighbours the signature and the tags it receives on. So no rank sends
before its peer is ready, every two neighbours compare their signatures, and tags need no agreement: each rank chooses
its own.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.trace import NO_CALL_TRACE, CallTrace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpi_gpucomp.engine.control_messages import Join
    from mpi_gpucomp.trace import InFlight

__all__ = ["CHANNELS", "AgreementCheck", "CallId", "CallRegistry", "CallResult"]

CHANNELS = 8
"""Tags of a call: one for each channel of its algorithm."""
REMEMBERED = 256
"""Completed calls that are remembered, for ranks whose call has failed."""


class CallId(NamedTuple):
    """One run of a collective; those without a name are counted together, under the empty name."""

    name: str
    run: int


class CallResult(NamedTuple):
    """What this rank did in a completed call: its signature, and the messages it sent by peer and channel."""

    signature: str
    sent: Counter[tuple[int, int]]
    trace: int | None = 0
    """None if it is forgotten."""


class CallRegistry:
    """The calls that this rank has begun, and the joins of its peers."""

    def __init__(self) -> None:
        """Start without calls."""
        self._begun: Counter[str] = Counter()
        self._joins: dict[CallId, dict[int, Join]] = {}
        self._completed: OrderedDict[CallId, CallResult] = OrderedDict()

    def begin(self, name: str) -> CallId:
        """Begin the next run of a name."""
        self._begun[name] += 1
        return CallId(name, self._begun[name])

    def has_begun(self, call: CallId) -> bool:
        """Return True if this rank has begun the call."""
        return call.run <= self._begun[call.name]

    @property
    def runs(self) -> dict[str, int]:
        """Return how often each name was begun."""
        return dict(self._begun)

    def add_join(self, call: CallId, peer: int, join: Join) -> None:
        """Keep the join of a peer that is ahead."""
        self._joins.setdefault(call, {})[peer] = join

    def joins(self, call: CallId) -> dict[int, Join]:
        """Return the joins of peers that were ahead."""
        return self._joins.get(call, {})

    def end(self, call: CallId, result: CallResult) -> None:
        """Remember a completed call."""
        self._joins.pop(call, None)
        self._completed[call] = result
        if len(self._completed) > REMEMBERED:
            self._completed.popitem(last=False)

    def result(self, call: CallId) -> CallResult:
        """Return what is remembered of a completed call."""
        return self._completed.get(call, CallResult("a call completed long ago", Counter(), None))


class AgreementCheck:
    """A call without data: it completes once all neighbours have joined with the same signature.

    Ranks submit it to compare what they are about to do outside of the engine, or to report that they cannot.
    """

    busy = False
    needs_python = True
    may_post_early = False
    longest = 0
    neighbours: frozenset[int] = frozenset()
    handle = 0

    def __init__(self, name: str, tag: int = 0) -> None:
        """Check the collective of this name."""
        self.name, self.tag, self.title = name, tag, name
        self.sent: Counter[tuple[int, int]] = Counter()
        self.done = False
        self.call_trace: CallTrace = NO_CALL_TRACE

    def set_peer_tag(self, peer: int, tag: int) -> None:
        """Do nothing."""

    def prepare(self, longest: int) -> None:
        """Do nothing."""

    def post_early(self) -> None:
        """Do nothing."""

    def run(self) -> None:
        """Do nothing."""

    def keep_running(self) -> None:
        """Do nothing."""

    def progress(self) -> bool:
        """Complete: a job is progressed only after its neighbours have joined it."""
        self.done = True
        return True

    def in_flight(self) -> list[InFlight]:
        """Return no transfers."""
        return []

    def suspend(self) -> None:
        """Do nothing."""

    def halt(self) -> None:
        """Do nothing."""

    def free(self) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""

    def quiesce(self) -> None:
        """Do nothing."""

    def drain(self, owed: Mapping[tuple[int, int], int]) -> bool:
        """Return True: nothing is in flight, and a peer with another signature has sent nothing either."""
        return True
