"""A collective that was submitted, and what concerns two ranks alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mpi_gpucomp.engine.roll import Call

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.engine.meeting import Meeting
    from mpi_gpucomp.engine.task import Task

    Work = Task | Meeting

__all__ = ["Errand", "Job"]

FIRST_PATIENCE = 80
"""Tries without progress after which a collective that has never moved lets another one run."""
STICKINESS = 5
"""How many times as long as its peers took before a collective that has moved is waited for."""
MOST_PATIENCE = 20_000


class Errand(Protocol):
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
        self.call = Call(name, 0)
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
            self.task.log.runs()
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
