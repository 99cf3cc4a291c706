"""Runs many collectives at once, in whatever order the ranks start them, in a bounded number of slots.

A collective that waits for a peer gives its slot up after some tries, with its position kept, and the next one in line
gets it; so no order in which ranks start collectives can make them wait for each other in a circle. A collective that
moves becomes harder to push out: its patience grows with the time that its peers take. And whoever has a slot
to give looks first for a collective that a peer has already sent something for. By that the ranks come to work at the
same collectives without anybody telling them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi_gpucomp.engine.task import Task

__all__ = ["Engine", "Job"]

FIRST_PATIENCE = 80
"""Tries without progress after which a collective that has never moved lets another one run."""
STICKINESS = 5
"""How many times as long as its peers took before a collective that has moved is waited for."""
MOST_PATIENCE = 20_000
LOOK_AROUND = 4
"""Tries without progress after which a job looks whether another one could go on in its place."""
FIRST_IN_LINE = 5
"""Tries that the first collective gets in each round; the others get one."""


class Job:
    """A collective that was submitted: its task, how it stands, and what went wrong."""

    def __init__(self, task: Task, priority: int = 0) -> None:
        """Start as waiting for a slot; a higher priority is served first."""
        self.task, self.priority = task, priority
        self.finished = False
        self.error: BaseException | None = None
        self.preempted = 0
        """How often it has given its slot up."""
        self.patience, self.idle = FIRST_PATIENCE, 0

    def move(self) -> bool:
        """Let the task go on; notice its end, and its failure."""
        try:
            moved = self.task.move()
            self.finished = self.task.done
        except BaseException as error:
            self.error, self.finished, moved = error, True, True
            self.task.abandon()
        if moved:
            self.patience = min(MOST_PATIENCE, max(self.patience, STICKINESS * self.idle))
            self.idle = 0
        elif not self.task.busy:
            self.idle += 1
        return moved


class Engine:
    """The jobs of one communicator."""

    def __init__(self, slots: int = 2) -> None:
        """Let so many jobs run at once."""
        self.slots = slots
        self._running: list[Job] = []
        self._failed: list[Job] = []
        self._waiting: deque[Job] = deque()

    def submit(self, job: Job) -> None:
        """Add a job to the line."""
        self._waiting.append(job)
        self._fill()

    @property
    def idle(self) -> bool:
        """Say whether there is nothing to do."""
        return not self._running and not self._waiting

    def progress(self) -> bool:
        """Go on with the running jobs; say whether anything moved."""
        moved = False
        for place, job in enumerate(list(self._running)):
            for _ in range(1 if place else FIRST_IN_LINE):
                moves = job.move()
                moved |= moves
                if job.finished or not moves:
                    break
            if job.finished:
                self._running.remove(job)
                if job.error is not None:
                    self._failed.append(job)  # its frames may still be leaving: their memory must stay
        self._preempt()
        self._fill()
        return moved

    def _preempt(self) -> None:
        """Take slots from those that wait, for one that a peer is at already, or when their patience is at its end."""
        for job in list(self._running):
            if not self._waiting:
                return
            other = self._expected() if job.idle and job.idle % LOOK_AROUND == 0 else None
            if other is not None or job.idle > job.patience:
                self._running.remove(job)
                job.task.suspend()
                job.idle, job.preempted = 0, job.preempted + 1
                self._run(other or self._first())
                self._waiting.append(job)

    def _fill(self) -> None:
        """Give free slots to a job that a peer is at already, else to the first in line of the highest priority."""
        while self._waiting and len(self._running) < self.slots:
            self._run(self._expected() or self._first())

    def _run(self, job: Job) -> None:
        self._waiting.remove(job)
        self._running.append(job)

    def _first(self) -> Job:
        return max(self._waiting, key=lambda job: job.priority)

    def _expected(self) -> Job | None:
        """Return the first waiting job that a peer has already sent something for."""
        return next((job for job in self._waiting if job.task.called_for()), None)
