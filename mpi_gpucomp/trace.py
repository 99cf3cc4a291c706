"""The seam between the engine and an observer such as the monitor.

The engine writes every call to a `Trace`, and every chunk to the call's `CallTrace`. It reports its polls and failures
to an `Observer`, and answers `snapshot` with plain data. All of them do nothing by default. The engine and the
transports import this module and nothing of the monitor; the monitor imports this module and nothing of the engine.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    *("CALL", "DECODE", "ENCODE", "KINDS", "NO_CALL_TRACE", "NO_OBSERVER", "NO_TRACE", "RECV", "SEND"),
    *("CallSnapshot", "CallTrace", "EngineSnapshot", "InFlight", "ObservedEngine", "Observer", "Trace"),
    *("WaitSnapshot", "no_annotation"),
]

SEND, RECV, ENCODE, DECODE, CALL = 1, 2, 3, 4, 5
KINDS = {SEND: "send", RECV: "receive", ENCODE: "encode", DECODE: "decode", CALL: "call"}
"""The kinds of trace records and their names."""


class CallTrace:
    """The trace of one call; this one records nothing. Times are nanoseconds of `perf_counter_ns`."""

    __slots__ = ()

    @property
    def ring(self) -> tuple[int, ...] | None:
        """Return where and how the core writes records of this call, as `gc_task_set_trace` takes it; None: nowhere."""
        return None

    def sent(self, peer: int, posted: int, nbytes: int, lane: int, chunk: int, rail: int) -> None:
        """Record a completed send."""

    def received(self, peer: int, posted: int, waited: int, nbytes: int, lane: int, chunk: int, rail: int) -> None:
        """Record a completed receive; `waited` is when the lane first blocked on it, or 0."""

    def coded(self, kind: int, posted: int, nbytes: int, raw_bytes: int, lane: int, chunk: int) -> None:
        """Record a chunk that was encoded or decoded."""

    def joined(self, peer: int) -> None:
        """Record that a neighbour has joined the call."""

    def start(self) -> None:
        """Record that all neighbours have joined and the call runs."""

    def end(self, *, failed: bool) -> None:
        """Record the end of the call."""


class Trace:
    """The trace of one communicator; this one records nothing."""

    def begin(self, name: str, signature: str) -> CallTrace:
        """Begin to record a call; calls with the same signature are comparable."""
        return NO_CALL_TRACE

    def share_numbers(self, next_number: Callable[[], int]) -> None:
        """Take the numbers of records from here: the core writes records too."""


class InFlight(NamedTuple):
    """A transfer that has not completed."""

    kind: int
    """SEND or RECV."""
    peer: int
    """Rank in the communicator."""
    rail: int
    posted: int
    waited: int
    """When a lane first blocked on it, or 0."""
    nbytes: int
    """The length of a send; 0 for a receive."""


class WaitSnapshot(NamedTuple):
    """A call that the caller is blocked in."""

    name: str
    run: int
    title: str


class CallSnapshot(NamedTuple):
    """A call in progress; peers are ranks in the communicator."""

    name: str
    run: int
    title: str
    signature: str
    absent: tuple[int, ...]
    """Neighbours that have not joined."""
    waited_for: bool
    """Whether the caller is blocked in it."""
    state: str
    coding: bool
    """Whether the codec is at work."""
    in_flight: tuple[InFlight, ...]


class EngineSnapshot(NamedTuple):
    """The state of one communicator's engine."""

    begun: dict[str, int]
    """Calls begun, by name; unnamed calls are counted together, and so are native MPI calls."""
    waits: tuple[WaitSnapshot, ...]
    calls: tuple[CallSnapshot, ...]
    failure: str | None
    """Why the communicator cannot be used any more."""

    @property
    def in_flight(self) -> list[InFlight]:
        """Return the transfers of all calls."""
        return [transfer for call in self.calls for transfer in call.in_flight]


class Observer:
    """Receives the engine's events; this one ignores them."""

    def on_poll(self, waiting: int, naps: int) -> None:
        """Handle a poll of the engine.

        `waiting` numbers the wait of a caller that is blocked, 0 if none is; `naps` counts how often it has slept.
        """

    def on_idle(self) -> None:
        """Handle a poll without progress, after several others, before the caller sleeps."""

    def on_failure(self, reason: str) -> None:
        """Handle the failure of a call or of the communicator."""

    def close(self) -> None:
        """Release what the observer holds: the communicator is freed."""


class ObservedEngine(Protocol):
    """What an observer may ask of an engine."""

    @property
    def rank(self) -> int:
        """Return this process's rank in the communicator."""
        ...

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """Return the state of all calls."""
        ...

    def blocked_since(self) -> float | None:
        """Return since when (`time.monotonic`) the caller has been blocked without progress; None if it is not."""
        ...

    def listen(self, kind: str, handler: Callable[[int, int, str], None]) -> None:
        """Call `handler(peer, number, text)` for every control message of a kind."""
        ...

    def send_control(self, peer: int, kind: str, number: int = 0, text: str = "") -> None:
        """Send a control message to a peer."""
        ...

    def broadcast_control(self, kind: str, number: int = 0, text: str = "") -> None:
        """Send a control message to all other ranks."""
        ...

    def attach(self, trace: Trace, observer: Observer) -> None:
        """Write to this trace and report to this observer from now on."""
        ...


NO_CALL_TRACE, NO_TRACE, NO_OBSERVER = CallTrace(), Trace(), Observer()


def no_annotation(name: str, device: str) -> AbstractContextManager[None]:
    """Return a context that does nothing; profilers name the work queued in a `with` block by one like it."""
    return nullcontext()
