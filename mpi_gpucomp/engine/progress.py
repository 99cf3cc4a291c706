"""Who turns the driver: whoever waits, or a thread in the background while nobody does.

Both back off when nothing moves, so that ranks that share cores leave them to each other.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.engine.engine import Engine
    from mpi_gpucomp.engine.scheduling import Job

__all__ = ["Backoff", "ProgressDriver"]

EAGER_TURNS = 4
SHORTEST_NAP, LONGEST_NAP = 20e-6, 500e-6
QUICK = 4e-4
"""Seconds between moves below which the next one is waited for without a nap."""
IDLE_NAP = 0.05
"""Seconds between looks at the letters of other ranks, which may ask what this one is doing, while there is no work."""


class Backoff:
    """How whoever waits rests when nothing moves: not at all for some turns, then longer and longer."""

    def __init__(self, eager_turns: int = EAGER_TURNS) -> None:
        """Begin with turns that follow each other at once."""
        self._eager, self._turns, self._nap = eager_turns, 0, SHORTEST_NAP
        self._moved = time.perf_counter()

    def reset(self) -> None:
        """Begin again: something has moved. Where that took long, so will the next."""
        now = time.perf_counter()
        gap, self._moved = now - self._moved, now
        self._turns = 0 if gap < QUICK else self._eager
        self._nap = min(LONGEST_NAP, max(SHORTEST_NAP, gap / 8))

    def rest(self) -> bool:
        """Rest behind a turn in which nothing has moved; say whether that was a nap."""
        self._turns += 1
        if self._turns <= self._eager:
            return False
        time.sleep(self._nap)
        self._nap = min(LONGEST_NAP, 2 * self._nap)
        return True


class ProgressDriver:
    """Turns one engine, by one thread at a time.

    The thread in the background goes on with what nobody waits for, answers other ranks while the caller is elsewhere,
    and notices if it never comes back from there.
    """

    def __init__(self, engine: Engine, *, background: bool) -> None:
        """Allow a thread in the background, where MPI allows calls from several threads."""
        self._engine, self.background = engine, background
        self.lock = threading.RLock()
        """Held while the engine is looked at or changed."""
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._waiters = self._waits = self._naps = 0
        self._closing = False
        if background:
            self._thread = threading.Thread(target=self._run, name="gpucomp-progress", daemon=True)
            self._thread.start()

    def submit(self, job: Job, *, background: bool = True) -> None:
        """Add a job; it goes on in the background from now on, unless somebody will wait for it anyway."""
        with self.lock:
            self._engine.submit(job)
        self.turn()
        if background and not job.finished:
            self._wake.set()

    def wait(self, job: Job) -> None:
        """Turn until the job is finished."""
        job.waiters += 1
        try:
            self.wait_until(lambda: job.finished)
        finally:
            job.waiters -= 1

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Turn until something is true."""
        backoff = Backoff()
        self._waiters += 1
        self._waits += 1
        try:
            while not ready():
                if self.turn():
                    backoff.reset()
                else:
                    self._naps += backoff.rest()
        finally:
            self._waiters -= 1
            if not self._engine.idle:
                self._wake.set()

    def turn(self) -> bool:
        """Go on a little; say whether anything moved."""
        with self.lock:
            moved = self._engine.progress(waiting=self._waits if self._waiters else 0, naps=self._naps)
        while self._engine.to_tell:
            self._tell(self._engine.to_tell.popleft())
        return moved

    def push(self) -> None:
        """Let the thread in the background go on with something new."""
        self._wake.set()

    def _tell(self, job: Job) -> None:
        """Call back, with no lock held: whoever is called may start other collectives."""
        try:
            job.tell()
        except BaseException as error:  # sys.exit in a callback must not end the thread in the background
            with self.lock:
                self._engine.alarm(job, error)
        job.finished = True

    def _run(self) -> None:
        backoff = Backoff(eager_turns=0)
        while not self._closing:
            self._wake.clear()  # before the look: whoever submits sets it afterwards
            if self._engine.idle or self._waiters:
                self._wake.wait(IDLE_NAP)
                if not self._waiters:
                    self.turn()
            elif self.turn():
                backoff.reset()
            else:
                backoff.rest()

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
