"""Which collectives run: a bounded number at once, and who gives way to whom.

A collective gets a slot once its neighbours have joined it. One that then waits for a peer gives its slot up after some
tries, with its position kept, and the next in line gets it; so no order in which ranks start collectives can make them
wait for each other in a circle. A collective that moves becomes harder to push out: its patience grows with the time
that its peers take. And whoever has a slot to give looks first for a collective that a peer has already sent
something for. By that the ranks come to work at the same collectives without anybody telling them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from mpi_gpucomp.engine.meeting import CHANNELS

if TYPE_CHECKING:
    from mpi_gpucomp.engine.job import Job
    from mpi_gpucomp.transport.base import Transport

__all__ = ["Slots"]

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
        tag = self._transport.unasked() if self._waiting else None
        if tag is None:
            return None
        base = tag - tag % CHANNELS
        return next((job for job in self._waiting if job.task.tag == base and not job.needs), None)
