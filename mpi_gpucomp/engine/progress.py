"""Who turns the crank: whoever waits, or a thread in the background while nobody does.

Both back off when nothing moves, so that ranks that share cores leave them to each other.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi_gpucomp.engine.engine import Engine, Job

__all__ = ["Crank"]

EAGER_TURNS = 50
SHORTEST_NAP, LONGEST_NAP = 20e-6, 500e-6


class Crank:
    """Turns one engine, by one thread at a time."""

    def __init__(self, engine: Engine, *, background: bool) -> None:
        """Allow a thread in the background, where MPI allows calls from several threads."""
        self._engine, self._background = engine, background
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._waiters = 0
        self._closing = False

    def submit(self, job: Job, *, background: bool = True) -> None:
        """Add a job; it goes on in the background from now on, unless somebody will wait for it anyway."""
        with self._lock:
            self._engine.submit(job)
            self._engine.progress()
        if background and self._background and not job.finished:
            self._start()

    def wait(self, job: Job) -> None:
        """Turn until the job is finished."""
        nap, idle = SHORTEST_NAP, 0
        self._waiters += 1
        try:
            while not job.finished:
                if self.turn():
                    nap, idle = SHORTEST_NAP, 0
                elif (idle := idle + 1) > EAGER_TURNS:
                    time.sleep(nap)
                    nap = min(LONGEST_NAP, 2 * nap)
        finally:
            self._waiters -= 1

    def turn(self) -> bool:
        """Go on a little; say whether anything moved."""
        with self._lock:
            return self._engine.progress()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpucomp-progress", daemon=True)
            self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        nap = SHORTEST_NAP
        while not self._closing:
            self._wake.clear()  # before the look: whoever submits sets it afterwards
            if self._engine.idle:
                self._wake.wait()
            elif self._waiters:
                time.sleep(LONGEST_NAP)
            elif self.turn():
                nap = SHORTEST_NAP
            else:
                time.sleep(nap)
                nap = min(LONGEST_NAP, 2 * nap)

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
