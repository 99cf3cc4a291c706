"""Scheduling of collectives: a bounded number runs at once, with preemption.

A job gets a slot once its neighbours have joined its call. One that then waits for a peer gives its slot up after a
while, keeping its position, and the next in the queue gets it; so no order in which ranks start collectives can make
them deadlock. The core reports which tasks have stalled: one that makes progress later than others, because its limit
grows with the response time of its peers. A free slot goes first to a job for which a peer has already sent a message,
so the ranks converge on the same collectives without further communication.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from mpi_gpucomp.engine.agreement import CHANNELS, CallId

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from mpi_gpucomp.core.wire import Wire
    from mpi_gpucomp.engine.agreement import AgreementCheck
    from mpi_gpucomp.engine.task import CollectiveTask

    Work: TypeAlias = CollectiveTask | AgreementCheck

__all__ = ["Completion", "Job", "P2POperation", "Slots"]


class Completion(Protocol):
    """What has completed, and has a callback that is called outside of the engine's lock."""

    error: BaseException | None
    finished: bool

    @property
    def title(self) -> str:
        """Return its name in messages."""
        ...

    def call_back(self) -> None:
        """Call the callback."""
        ...


class P2POperation(Protocol):
    """A point-to-point operation, which needs no slot and no agreement of all ranks."""

    done: bool
    error: BaseException | None

    def progress(self) -> bool:
        """Make progress without blocking; return True if there was any."""
        ...


class Job:
    """A submitted collective: its task, state and error."""

    def __init__(
        self,
        task: Work,
        signature: str = "",
        *,
        name: str = "",
        priority: int = 0,
        everyone: bool = False,
        balance: int = 0,
        counts: str = "",
    ) -> None:
        """Run a task whose signature all ranks compare; with a name, ranks may start it in any order.

        Each rank compares with its neighbours, and with `everyone` where no rank knows the lengths of all blocks, or
        where no rank may continue before all have agreed. Then the sum of the ranks' `balance` must be 0, modulo 2**64;
        `counts` explains this rank's in errors.
        """
        self.task, self.signature, self.name, self.priority, self.everyone = task, signature, name, priority, everyone
        self.balance, self.counts = balance, counts
        self.trace = 0
        """Rolling hash of the pass-through calls before this job; 0 for named jobs, which are unordered."""
        self.call = CallId(name, 0)
        self.finished = False
        self.error: BaseException | None = None
        self.preempted = 0
        """How often it has lost its slot."""
        self.waiters = 0
        """Callers blocked in it."""
        self.needs: frozenset[int] = frozenset()
        """The peers that must join before it may run."""
        self.longest = task.longest
        self.prepared = self.started = False
        self.on_done: Callable[[Job], None] | None = None
        """Called when it has completed, before `finished` is set."""

    @property
    def full_signature(self) -> str:
        """Return the signature and what may differ between ranks, for errors."""
        return f"{self.signature}, {self.counts}" if self.counts else self.signature

    @property
    def title(self) -> str:
        """Return its name in messages."""
        return f"{self.task.name} {self.name!r}" if self.name else f"{self.task.name} (call {self.call.run})"

    def post_early(self) -> None:
        """Post receives before the peers have joined, where all ranks know the lengths of all blocks.

        A peer sends only after it has compared the signatures. It cannot complete before this rank runs, which has to
        post the last receive: so it still gets an error that this rank finds in the joins of others.
        """
        if not self.everyone and self.task.may_post_early:
            self.task.prepare(self.longest)
            self.task.post_early()
            self.prepared = True

    def withdraw(self) -> None:
        """Cancel receives that were posted early."""
        if self.prepared and not self.started:
            self.task.suspend()

    def run(self) -> None:
        """Start the task, or continue it."""
        if not self.started:
            self.task.call_trace.start()
            if not self.prepared:
                self.task.prepare(self.longest)
            self.prepared = self.started = True
        self.task.run()

    def call_back(self) -> None:
        """Call the completion callback, if there is one."""
        if self.on_done is not None:
            self.on_done(self)


class Slots:
    """The running jobs, and the queue."""

    def __init__(self, wire: Wire, count: int) -> None:
        """Run `count` jobs at once."""
        self._wire, self._count = wire, count
        self.running: list[Job] = []
        self._queue: deque[Job] = deque()
        self._waiting = False
        """Whether a job that could run waits for a slot."""

    def add(self, job: Job) -> None:
        """Append a job to the queue; one that is first in line for a free slot gets its receives posted."""
        if not self._queue and len(self.running) < self._count:
            job.post_early()
        self._queue.append(job)

    def remove(self, job: Job) -> None:
        """Remove a job from its slot or the queue."""
        for jobs in (self.running, self._queue):
            if job in jobs:
                jobs.remove(job)

    def clear(self) -> None:
        """Remove all jobs."""
        self.running.clear()
        self._queue.clear()

    def on_stall(self, job: Job, *, too_long: bool) -> None:
        """Give the slot of a stalled job to another: one that a peer has sent to, or any if it has stalled too long."""
        if job not in self.running:
            return
        other = self._next() if too_long else self._expected()
        if other is None:
            job.task.keep_running()
            return
        self.running.remove(job)
        job.task.suspend()
        job.preempted += 1
        self._run(other)
        self._queue.append(job)

    def fill(self) -> None:
        """Give free slots to jobs that can run; have stalls reported if others wait."""
        while self._queue and len(self.running) < self._count and (job := self._next()) is not None:
            self._run(job)
        waiting = any(not job.needs for job in self._queue)
        if waiting != self._waiting:
            self._waiting = waiting
            self._wire.set_polling(preempting=waiting)

    def _run(self, job: Job) -> None:
        self._queue.remove(job)
        self.running.append(job)
        if len(self.running) == self._count:
            for waiting in self._queue:
                waiting.withdraw()
        job.run()

    def _next(self) -> Job | None:
        """Return the job for a free slot: one that a peer has sent to, else the first of the highest priority.

        Jobs that were preempted come after those that were not, or they would hand the slot back and forth.
        """
        if len(self._queue) == 1:
            return None if self._queue[0].needs else self._queue[0]
        expected = self._expected()
        if expected is not None:
            return expected
        ready = (job for job in self._queue if not job.needs)
        return max(ready, key=lambda job: (-job.preempted, job.priority), default=None)

    def _expected(self) -> Job | None:
        """Return a queued job that a peer has already sent a message for."""
        tag = self._wire.probe_any() if self._queue else None
        if tag is None:
            return None
        base = tag - tag % CHANNELS
        return next((job for job in self._queue if job.task.tag == base and not job.needs), None)
