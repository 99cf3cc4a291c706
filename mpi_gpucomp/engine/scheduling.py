"""Which collectives run: a bounded number at once, and who gives way to whom.

A collective gets a slot once its neighbours have joined it. One that then waits for a peer gives its slot up after some
tries, with its position kept, and the next in line gets it; so no order in which ranks start collectives can make them
wait for each other in a circle. A collective that moves becomes harder to push out: its patience grows with the time
that its peers take. And whoever has a slot to give looks first for a collective that a peer has already sent
something for. By that the ranks come to work at the same collectives without anybody telling them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from mpi_gpucomp.engine.agreement import CHANNELS, CallId

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from mpi_gpucomp.engine.agreement import AgreementCheck
    from mpi_gpucomp.engine.task import Task
    from mpi_gpucomp.transport.base import Transport

    Work: TypeAlias = Task | AgreementCheck

__all__ = ["Job", "P2POperation", "Slots"]

LOOK_AROUND = 4
"""Tries without progress after which a job looks whether another one could go on in its place."""


class Slots:
    """The jobs that run, and those in line."""

    def __init__(self, transport: Transport, count: int) -> None:
        """Let so many run at once."""
        self._transport, self._count = transport, count
        self.running: list[Job] = []
        self._waiting: deque[Job] = deque()

    def add(self, job: Job) -> None:
        """Put a job at the end of the line."""
        self._waiting.append(job)

    def remove(self, job: Job) -> None:
        """Let a job go that is over, wherever it is."""
        for line in (self.running, self._waiting):
            if job in line:
                line.remove(job)

    def clear(self) -> None:
        """Let all go."""
        self.running.clear()
        self._waiting.clear()

    def preempt(self) -> None:
        """Take slots from those that wait, for one that a peer is at already, or when their patience is at its end."""
        for job in list(self.running):
            if not self._waiting:
                return
            other = None
            if job.idle > job.patience:
                other = self._next()
            elif job.idle and job.idle % LOOK_AROUND == 0:
                other = self._expected()
            if other is not None:
                self.running.remove(job)
                job.task.suspend()
                job.idle, job.preempted = 0, job.preempted + 1
                self._run(other)
                self._waiting.append(job)

    def fill(self) -> None:
        """Give free slots to jobs that can go on."""
        while self._waiting and len(self.running) < self._count and (job := self._next()) is not None:
            self._run(job)

    def _run(self, job: Job) -> None:
        self._waiting.remove(job)
        self.running.append(job)

    def _next(self) -> Job | None:
        """Return who gets a slot: one that a peer is at already, else the first of the highest priority.

        Those that had a slot and could not use it come behind those that had none, or they would pass it to and fro.
        """
        expected = self._expected()
        if expected is not None:
            return expected
        ready = (job for job in self._waiting if not job.needs)
        return max(ready, key=lambda job: (-job.preempted, job.priority), default=None)

    def _expected(self) -> Job | None:
        """Return a waiting job that a peer has already sent something for."""
        tag = self._transport.probe_any() if self._waiting else None
        if tag is None:
            return None
        base = tag - tag % CHANNELS
        return next((job for job in self._waiting if job.task.tag == base and not job.needs), None)


# A collective that was submitted, and what concerns two ranks alone.

FIRST_PATIENCE = 80
"""Tries without progress after which a collective that has never moved lets another one run."""
STICKINESS = 5
"""How many times as long as its peers took before a collective that has moved is waited for."""
MOST_PATIENCE = 20_000


class P2POperation(Protocol):
    """Something to be done bit by bit that needs no slot and no agreement of all ranks."""

    done: bool
    error: Exception | None

    def move(self) -> bool:
        """Go on without waiting; say whether anything has moved."""
        ...


class Job:
    """A collective that was submitted: its task, how it stands, and what went wrong."""

    def __init__(
        self, task: Work, said: str = "", *, name: str = "", priority: int = 0, everyone: bool = False
    ) -> None:
        """Say what it does, for peers to compare; give it a name if ranks may start it in any order.

        Ranks compare it with their neighbours, and with `everyone` where no rank knows the lengths of all blocks, or
        where what comes next must not begin on any rank before all have agreed.
        """
        self.task, self.said, self.name, self.priority, self.everyone = task, said, name, priority, everyone
        self.trace = 0
        """What went straight to MPI before it, see `Joined`; for one with a name, which knows no before, nothing."""
        self.call = CallId(name, 0)
        self.finished = False
        self.error: BaseException | None = None
        self.preempted = 0
        """How often it has given its slot up."""
        self.waiters = 0
        """How many callers wait for it."""
        self.patience, self.idle = FIRST_PATIENCE, 0
        self.needs: frozenset[int] = frozenset()
        """The peers that must have joined before it may run."""
        self.longest = task.longest
        self.started = False
        self.when_done: Callable[[Job], None] | None = None
        """Called when it is over, before it counts as finished."""

    @property
    def title(self) -> str:
        """Name it for people."""
        return f"{self.task.name} {self.name!r}" if self.name else f"{self.task.name} (call {self.call.run})"

    def start(self) -> None:
        """Get ready to move, once."""
        if not self.started:
            self.task.call_trace.start()
            self.task.prepare(self.longest)
            self.started = True

    def move(self) -> bool:
        """Let the task go on."""
        self.start()
        moved = self.task.move()
        if moved:
            self.patience = min(MOST_PATIENCE, max(self.patience, STICKINESS * self.idle))
            self.idle = 0
        elif not self.task.busy:
            self.idle += 1
        return moved

    def tell(self) -> None:
        """Tell whoever wants to hear that it is over."""
        if self.when_done is not None:
            self.when_done(self)
