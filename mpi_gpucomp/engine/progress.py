"""Drives an engine's progress: in the thread that waits, or in a background thread.

Both back off without progress, so that ranks that share cores leave them to each other.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from mpi_gpucomp.trace import NO_OBSERVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.engine.engine import Engine
    from mpi_gpucomp.engine.scheduling import Completion, Job

__all__ = ["Backoff", "ProgressDriver"]

EAGER_POLLS = 4
SHORTEST_NAP, LONGEST_NAP = 20e-6, 500e-6
QUICK = 4e-4
"""Seconds between progress below which the next is polled for without sleeping."""
IDLE_SECONDS = 0.05
"""Seconds between polls for control messages, such as deadlock queries, while there is no work."""
WATCH_SECONDS = 3e-3
"""Seconds between calls of the observer, which notices that a blocked thread did not run for longer."""


class Backoff:
    """Back-off of a polling thread: no sleep for some polls, then longer and longer ones."""

    def __init__(self, eager_polls: int = EAGER_POLLS) -> None:
        """Start with polls without sleep."""
        self._eager, self._polls, self._nap = eager_polls, 0, SHORTEST_NAP
        self._progressed = time.perf_counter()

    def reset(self) -> None:
        """Start again after progress; where that took long, the next is expected to take as long."""
        now = time.perf_counter()
        gap, self._progressed = now - self._progressed, now
        self._polls = 0 if gap < QUICK else self._eager
        self._nap = min(LONGEST_NAP, max(SHORTEST_NAP, gap / 8))

    def next_nap(self) -> float:
        """Return how long to sleep after a poll without progress, in seconds."""
        self._polls += 1
        if self._polls <= self._eager:
            return 0.0
        nap, self._nap = self._nap, min(LONGEST_NAP, 2 * self._nap)
        return nap

    def rest(self) -> bool:
        """Back off after a poll without progress; return True if that was a sleep."""
        nap = self.next_nap()
        if nap:
            time.sleep(nap)
        return nap > 0


class ProgressDriver:
    """Drives one engine, from one thread at a time.

    The background thread progresses calls that no caller waits for, handles control messages while the caller is
    elsewhere, and detects that it never returns from there.
    """

    def __init__(self, engine: Engine, *, background: bool) -> None:
        """Start the background thread if `background`, which needs MPI_THREAD_MULTIPLE."""
        self._engine, self.background = engine, background
        self.lock = threading.RLock()
        """Guards the engine."""
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._waiters = self._waits = 0
        self._closing = False
        if background:
            self._thread = threading.Thread(target=self._run, name="gpucomp-progress", daemon=True)
            self._thread.start()

    def submit(self, job: Job, *, background: bool = True) -> None:
        """Submit a job; with `background`, the background thread progresses it until a caller waits for it."""
        with self.lock:
            self._engine.submit(job)
        if not background:
            return  # the caller waits for it, or polls
        self.poll()
        if not job.finished:
            self._wake.set()

    def wait(self, job: Job) -> None:
        """Block until the job has finished."""
        job.waiters += 1
        try:
            self.wait_until(lambda: job.finished, by_event=True)
        finally:
            job.waiters -= 1

    def wait_until(self, ready: Callable[[], bool], *, by_event: bool = False) -> None:
        """Block until a condition is true; `by_event` if only events of the engine can make it so."""
        backoff = Backoff()
        self._waiters += 1
        self._waits += 1
        try:
            while not ready():
                self._drive(backoff, foreground=True, by_event=by_event)
        finally:
            self._waiters -= 1
            if not self._engine.idle:
                self._wake.set()

    def _drive(self, backoff: Backoff, *, foreground: bool, by_event: bool) -> None:
        """Run the core until there is an event, or as long as nothing else has to be polled, and handle the events."""
        engine = self._engine
        if by_event and not engine.needs_polling:
            seconds = IDLE_SECONDS if engine.observer is NO_OBSERVER else WATCH_SECONDS
        else:
            seconds = backoff.next_nap()
        moved = engine.wire.run(seconds, foreground=foreground, until_moved=not by_event or engine.needs_polling)
        if self.poll(moved=moved):
            backoff.reset()

    def poll(self, *, moved: bool | None = None) -> bool:
        """Poll the engine once and call completion callbacks; return True if anything progressed.

        `moved` is what the core has returned, if it has just run.
        """
        with self.lock:
            waiting = self._waits if self._waiters else 0
            moved = self._engine.progress(waiting=waiting, moved=moved)
            if self._engine.has_ended and self._waiters:
                self._engine.wire.interrupt()
            self._engine.has_ended = False
        while self._engine.callbacks:
            self._call_back(self._engine.callbacks.popleft())
        return moved

    def wake(self) -> None:
        """Wake the background thread for new work."""
        self._wake.set()

    def _call_back(self, job: Completion) -> None:
        """Call a job's callback without the lock: it may start other collectives."""
        try:
            job.call_back()
        except BaseException as error:  # sys.exit in a callback must not end the background thread
            with self.lock:
                self._engine.fail_next_call(job, error)
        job.finished = True

    def _run(self) -> None:
        backoff = Backoff(eager_polls=0)
        while not self._closing:
            self._wake.clear()  # before the poll: a submit sets it afterwards
            if self._engine.idle or self._waiters:
                self._wake.wait(IDLE_SECONDS)
                if not self._waiters:
                    self.poll()
            else:
                self._drive(backoff, foreground=False, by_event=True)

    def close(self) -> None:
        """Stop the background thread."""
        self._closing = True
        self._wake.set()
        self._engine.wire.interrupt()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
