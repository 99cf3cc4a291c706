"""Notices when the caller waits for something that will never come, in a collective or in MPI itself.

When nothing has moved for a while, it asks all ranks what they wait for. If they wait for each other, it ends what they
wait for, on all of them.
"""

from __future__ import annotations

import pickle
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi_gpucomp.engine.agreement import CallId
from mpi_gpucomp.engine.failure import Stuck, deadlock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mpi_gpucomp.engine.agreement import CallRegistry
    from mpi_gpucomp.engine.scheduling import Job
    from mpi_gpucomp.transport.base import Transport

__all__ = ["LOW_BITS", "DeadlockDetector", "DeadlockProbe", "Status", "describe", "is_circular", "post_all"]


# Is everybody waiting for everybody? Asks all ranks what they wait for, and judges.
#
# Preemption solves every order in which collectives are started. It cannot help ranks that wait for one collective
# before
# they start another which a peer waits for. That shows when all who should join are waiting themselves.

ANSWER_SECONDS = 2.0
"""How long a rank has to answer before it counts as one that does not."""


class Status(NamedTuple):
    """What a rank tells of itself: what it waits for (with a title to print), and how far it is with every name."""

    waits: dict[CallId, str]
    runs: dict[str, int]

    def joined(self, call: CallId) -> bool:
        """Say whether it has started this call."""
        return self.runs.get(call.name, 0) >= call.run


class DeadlockProbe:
    """One round of questions."""

    def __init__(self, number: int, size: int, rank: int, own: Status) -> None:
        """Ask all but this rank."""
        self.number = number
        self._size, self._until = size, time.monotonic() + ANSWER_SECONDS
        self.told: dict[int, Status] = {rank: own}

    @property
    def complete(self) -> bool:
        """Say whether all have answered, or had their time."""
        return len(self.told) == self._size or time.monotonic() > self._until


def _absent(told: Mapping[int, Status], size: int, call: CallId) -> list[int]:
    return [rank for rank in range(size) if rank not in told or not told[rank].joined(call)]


def is_circular(told: Mapping[int, Status], size: int, rank: int) -> bool:
    """Say whether everyone whom `rank` waits for, directly or not, waits as well: then nothing will ever move."""
    circle, fresh = {rank}, [rank]
    while fresh:
        status = told.get(fresh.pop())
        if status is None or not status.waits:
            return False
        for call in status.waits:
            absent = _absent(told, size, call)
            if not absent:
                return False
            fresh += [other for other in absent if other not in circle]
            circle.update(absent)
    return True


def describe(told: Mapping[int, Status], size: int) -> str:
    """Say who waits for what, and who has not joined it."""
    parts = []
    for rank in range(size):
        status = told.get(rank)
        if status is None:
            parts.append(f"rank {rank} does not answer")
        elif not status.waits:
            parts.append(f"rank {rank} waits for nothing here")
        else:
            parts += [f"rank {rank} waits for {title}{_who(told, size, call)}" for call, title in status.waits.items()]
    return "; ".join(parts)


def _who(told: Mapping[int, Status], size: int, call: CallId) -> str:
    absent = _absent(told, size, call)
    if not absent:
        return ", which all have joined"
    many = len(absent) > 1
    return f", which rank{'s' * many} {', '.join(map(str, absent))} {'have' if many else 'has'} not joined"


LOW_BITS = (1 << 61) - 1
OUTSIDE = "MPI's own"
"""The name by which calls that go straight to MPI are counted."""
NEVER_COMES = 10
"""Timeouts after which a rank that waits gives up even if it cannot prove that nothing will move."""


def post_all(transport: Transport, *content: Any) -> None:
    """Leave a letter for every other rank."""
    letter = pickle.dumps(content)
    for peer in range(transport.size):
        if peer != transport.rank:
            transport.send_control(peer, letter)


class DeadlockDetector:
    """What the caller waits for, and since when."""

    def __init__(
        self,
        transport: Transport,
        roll: CallRegistry,
        jobs: Mapping[CallId, Job],
        fail: Callable[[Job, Exception], None],
    ) -> None:
        """Look at these jobs; `fail` ends one of them."""
        self._transport, self._registry, self._jobs, self._fail = transport, roll, jobs, fail
        self.outside: str | None = None
        """What the caller is doing in MPI, on its own."""
        self.steps = 0
        """How many such calls there have been."""
        self.trace = 0
        """A number made of all of them, for ranks to compare."""
        self.stuck_outside: Callable[[Exception], None] = _ignore
        """What to do when the caller will never come back from there."""
        self._seen_outside = 0, 0.0
        self._moved_at, self._asked_at = time.monotonic(), 0.0
        self._inquiry: DeadlockProbe | None = None
        self._inquiries = 0

    def note(self, number: int) -> None:
        """Count a call that goes straight to MPI, and add what it is to the trace of all such calls."""
        self.trace = (self.trace * 31 + number) & LOW_BITS
        self.steps += 1

    def moved(self) -> None:
        """Take notice that something goes on."""
        self._moved_at = time.monotonic()

    def status(self) -> Status:
        """Return what this rank tells others of itself."""
        waits = {job.call: job.title for job in self._jobs.values() if job.waiters}
        if self.outside is not None:
            waits[CallId(OUTSIDE, self.steps)] = f"{self.outside} of MPI's own (number {self.steps})"
        return Status(waits, self._registry.runs | {OUTSIDE: self.steps})

    def waits_since(self) -> float | None:
        """Return since when the caller has been waiting with nothing moving, if it has."""
        if self.outside is None:
            return self._moved_at if any(job.waiters for job in self._jobs.values()) else None
        if self._seen_outside[0] != self.steps:
            self._seen_outside = self.steps, time.monotonic()
        return self._seen_outside[1]

    def look(self, timeout: float) -> None:
        """Ask all ranks what they wait for, when somebody here has waited for long; end it if nothing can move."""
        now, since = time.monotonic(), self.waits_since()
        if since is None:
            return
        if self._inquiry is None and now - max(since, self._asked_at) > timeout:
            self._inquiries, self._asked_at = self._inquiries + 1, now
            size, rank = self._transport.size, self._transport.rank
            self._inquiry = DeadlockProbe(self._inquiries, size, rank, self.status())
            post_all(self._transport, "ask", self._inquiries)
        elif self._inquiry is not None and self._inquiry.complete:
            self._judge(self._inquiry, now - since > NEVER_COMES * timeout)
            self._inquiry = None

    def _judge(self, inquiry: DeadlockProbe, enough: bool) -> None:
        size, rank = self._transport.size, self._transport.rank
        if enough or is_circular(inquiry.told, size, rank):
            calls = {other: list(status.waits) for other, status in inquiry.told.items()}
            text = describe(inquiry.told, size)
            post_all(self._transport, "stuck", text, calls)
            self.hear_stuck(rank, text, calls)

    def hear_ask(self, peer: int, number: int) -> None:
        """Tell a rank that asks."""
        self._transport.send_control(peer, pickle.dumps(("tell", number, self.status())))

    def hear_tell(self, peer: int, number: int, status: Status) -> None:
        """Take a rank's answer."""
        if self._inquiry is not None and self._inquiry.number == number:
            self._inquiry.told[peer] = status

    def hear_stuck(self, peer: int, text: str, calls: dict[int, list[CallId]]) -> None:
        """End what this rank was waiting for when it was asked."""
        for call in calls.get(self._transport.rank, ()):
            if call == CallId(OUTSIDE, self.steps) and self.outside is not None:
                self.stuck_outside(deadlock(text, self._transport.rank))
            job = self._jobs.get(call)
            if job is not None:
                self._fail(job, Stuck(text))


def _ignore(error: Exception) -> None:
    """Do nothing about it."""
