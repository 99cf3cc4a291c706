"""Deadlock detection: a caller blocked in a collective or in a native MPI call that can never complete.

Preemption makes every order in which collectives are started work. It cannot help ranks that wait for one collective
before they start another one that a peer waits for. So when a caller has been blocked without progress for a while, the
engine asks all ranks what they are blocked in. If they wait for each other, those calls fail on all ranks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.engine.agreement import CallId
from mpi_gpucomp.engine.control_messages import (
    ControlMessage,
    DeadlockFound,
    DeadlockQuery,
    DeadlockReply,
    RankWait,
    Wait,
    encode,
)
from mpi_gpucomp.engine.failure import DeadlockedCall, deadlock_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mpi_gpucomp.core.wire import Wire
    from mpi_gpucomp.engine.agreement import CallRegistry
    from mpi_gpucomp.engine.scheduling import Job

__all__ = ["LOW_BITS", "DeadlockDetector", "DeadlockProbe", "WaitStatus", "broadcast", "describe", "is_circular"]

REPLY_SECONDS = 2.0
"""How long a rank has to reply before it counts as silent."""
LOW_BITS = (1 << 61) - 1
NATIVE_MPI = "native MPI"
"""The name under which native MPI calls are counted."""
GIVE_UP_TIMEOUTS = 10
"""Timeouts after which a blocked call fails even if a deadlock cannot be proved."""


class WaitStatus(NamedTuple):
    """What a rank is blocked in, with titles, and how often it has begun each name."""

    waits: dict[CallId, str]
    runs: dict[str, int]

    def has_joined(self, call: CallId) -> bool:
        """Return True if the rank has begun this call."""
        return self.runs.get(call.name, 0) >= call.run


class DeadlockProbe:
    """One query of all ranks."""

    def __init__(self, number: int, size: int, rank: int, own: WaitStatus) -> None:
        """Wait for the replies of all but this rank."""
        self.number = number
        self._size, self._deadline = size, time.monotonic() + REPLY_SECONDS
        self.replies: dict[int, WaitStatus] = {rank: own}

    @property
    def complete(self) -> bool:
        """Return True if all have replied, or the time is over."""
        return len(self.replies) == self._size or time.monotonic() > self._deadline


def _absent(replies: Mapping[int, WaitStatus], size: int, call: CallId) -> list[int]:
    return [rank for rank in range(size) if rank not in replies or not replies[rank].has_joined(call)]


def is_circular(replies: Mapping[int, WaitStatus], size: int, rank: int) -> bool:
    """Return True if every rank that `rank` waits for, directly or not, is blocked too: a deadlock."""
    reached, pending = {rank}, [rank]
    while pending:
        status = replies.get(pending.pop())
        if status is None or not status.waits:
            return False
        for call in status.waits:
            absent = _absent(replies, size, call)
            if not absent:
                return False
            pending += [other for other in absent if other not in reached]
            reached.update(absent)
    return True


def describe(replies: Mapping[int, WaitStatus], size: int) -> str:
    """Describe which rank waits for which call, and who has not joined it."""
    parts = []
    for rank in range(size):
        status = replies.get(rank)
        if status is None:
            parts.append(f"rank {rank} does not reply")
        elif not status.waits:
            parts.append(f"rank {rank} is not blocked here")
        else:
            parts += [
                f"rank {rank} waits for {title}{_joined_by(replies, size, call)}"
                for call, title in status.waits.items()
            ]
    return "; ".join(parts)


def _joined_by(replies: Mapping[int, WaitStatus], size: int, call: CallId) -> str:
    absent = _absent(replies, size, call)
    if not absent:
        return ", which all ranks have joined"
    many = len(absent) > 1
    return f", which rank{'s' * many} {', '.join(map(str, absent))} {'have' if many else 'has'} not joined"


def broadcast(wire: Wire, message: ControlMessage) -> None:
    """Send a control message to every other rank."""
    data = encode(message)
    for peer in range(wire.size):
        if peer != wire.rank:
            wire.send_control(peer, data)


class DeadlockDetector:
    """Tracks what the caller is blocked in, and since when."""

    def __init__(
        self,
        wire: Wire,
        registry: CallRegistry,
        jobs: Mapping[CallId, Job],
        fail: Callable[[Job, Exception], None],
    ) -> None:
        """Observe these jobs; `fail` ends one of them."""
        self._wire, self._registry, self._jobs, self._fail = wire, registry, jobs, fail
        self.in_mpi_call: str | None = None
        """The native MPI call that the caller is in."""
        self.mpi_calls = 0
        """The number of native MPI calls so far."""
        self.mpi_trace = 0
        """Rolling hash of all of them, for ranks to compare."""
        self.on_mpi_hang: Callable[[Exception], None] = _ignore
        """Called when the caller will never return from its native MPI call."""
        self._mpi_call_seen = 0, 0.0
        self._progressed_at, self._queried_at = time.monotonic(), 0.0
        self._probe: DeadlockProbe | None = None
        self._probes = 0

    def count_mpi_call(self, number: int) -> None:
        """Count a native MPI call, and add `number`, which identifies it, to the trace."""
        self.mpi_trace = (self.mpi_trace * 31 + number) & LOW_BITS
        self.mpi_calls += 1

    def on_progress(self) -> None:
        """Note that something has progressed."""
        self._progressed_at = time.monotonic()

    def status(self) -> WaitStatus:
        """Return what this rank is blocked in."""
        waits = {job.call: job.title for job in self._jobs.values() if job.waiters}
        if self.in_mpi_call is not None:
            waits[CallId(NATIVE_MPI, self.mpi_calls)] = f"native MPI {self.in_mpi_call} (call {self.mpi_calls})"
        return WaitStatus(waits, self._registry.runs | {NATIVE_MPI: self.mpi_calls})

    def blocked_since(self) -> float | None:
        """Return since when the caller has been blocked without progress; None if it is not."""
        if self.in_mpi_call is None:
            return self._progressed_at if any(job.waiters for job in self._jobs.values()) else None
        if self._mpi_call_seen[0] != self.mpi_calls:
            self._mpi_call_seen = self.mpi_calls, time.monotonic()
        return self._mpi_call_seen[1]

    def check(self, timeout: float) -> None:
        """Query all ranks when the caller has been blocked for `timeout`; fail the calls of a deadlock."""
        now, since = time.monotonic(), self.blocked_since()
        if since is None:
            return
        if self._probe is None and now - max(since, self._queried_at) > timeout:
            self._probes, self._queried_at = self._probes + 1, now
            self._probe = DeadlockProbe(self._probes, self._wire.size, self._wire.rank, self.status())
            broadcast(self._wire, DeadlockQuery(self._probes))
        elif self._probe is not None and self._probe.complete:
            self._evaluate(self._probe, give_up=now - since > GIVE_UP_TIMEOUTS * timeout)
            self._probe = None

    def _evaluate(self, probe: DeadlockProbe, *, give_up: bool) -> None:
        size, rank = self._wire.size, self._wire.rank
        if give_up or is_circular(probe.replies, size, rank):
            waits = tuple(RankWait(other, *call) for other, status in probe.replies.items() for call in status.waits)
            found = DeadlockFound(describe(probe.replies, size), waits)
            broadcast(self._wire, found)
            self.on_found(rank, found)

    def on_query(self, peer: int, message: DeadlockQuery) -> None:
        """Reply to a query."""
        waits, runs = self.status()
        listed = tuple(Wait(*call, title) for call, title in waits.items())
        self._wire.send_control(peer, encode(DeadlockReply(message.number, listed, runs)))

    def on_reply(self, peer: int, message: DeadlockReply) -> None:
        """Take a reply."""
        if self._probe is not None and self._probe.number == message.number:
            waits = {CallId(wait.name, wait.run): wait.title for wait in message.waits}
            self._probe.replies[peer] = WaitStatus(waits, message.runs)

    def on_found(self, peer: int, message: DeadlockFound) -> None:
        """Fail the calls that this rank was blocked in when it replied."""
        for wait in message.waits:
            if wait.rank != self._wire.rank:
                continue
            call = CallId(wait.name, wait.run)
            if call == CallId(NATIVE_MPI, self.mpi_calls) and self.in_mpi_call is not None:
                self.on_mpi_hang(deadlock_error(message.text, self._wire.rank))
            job = self._jobs.get(call)
            if job is not None:
                self._fail(job, DeadlockedCall(message.text))


def _ignore(error: Exception) -> None:
    """Do nothing."""
