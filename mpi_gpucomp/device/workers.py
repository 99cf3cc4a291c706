"""The threads that share the tiles of one kernel: one pool for all host streams of the process.

A kernel's tiles are cut into contiguous pieces. The stream's own thread and the idle workers each take the next piece
until none is left, so a stream never waits for a worker that is busy elsewhere. Workers run kernels alone and wait
for nothing else; with nothing to do they sleep.
"""

from __future__ import annotations

import os
from _thread import allocate_lock
from ctypes import c_int64
from itertools import count
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["VARIABLE", "Workers", "usable_cores", "workers"]

VARIABLE = "MPI_GPUCOMP_WORKERS"


def usable_cores() -> int:
    """Return how many threads may share one kernel: the environment's word, else the cores of this process."""
    said = os.environ.get(VARIABLE)
    if not said:
        affinity = getattr(os, "sched_getaffinity", None)
        return len(affinity(0)) if affinity else os.cpu_count() or 1
    if not said.isdecimal() or int(said) < 1:
        raise SpecError(
            f"environment variable {VARIABLE}",
            expected="a whole number of at least 1",
            got=f"'{said}'",
            remedy="Set the number of threads that share one kernel, or unset it to use every core.",
        )
    return int(said)


class _Job:
    """One kernel's tiles, cut into pieces that threads take one after the other."""

    __slots__ = ("_args", "_error", "_finished", "_function", "_gate", "_next", "_pieces", "_tiles")

    def __init__(self, function: Callable[..., None], tiles: int, args: list[Any], pieces: int) -> None:
        self._function, self._tiles, self._args, self._pieces = function, tiles, args, pieces
        self._error: BaseException | None = None
        self._next, self._finished = count(), count(1)
        self._gate = allocate_lock()
        self._gate.acquire()

    def help(self) -> None:
        """Run pieces until all are taken; the thread that ends the last one opens the gate."""
        while (piece := next(self._next)) < self._pieces:
            first, last = self._tiles * piece // self._pieces, self._tiles * (piece + 1) // self._pieces
            try:
                self._function(c_int64(first), c_int64(last), *self._args)
            except BaseException as error:
                self._error = error
            if next(self._finished) == self._pieces:
                self._gate.release()

    def wait(self) -> None:
        """Wait until every piece has ended."""
        self._gate.acquire()
        if self._error is not None:
            raise self._error


class Workers:
    """A number of threads, this one included, that share the tiles of kernels."""

    def __init__(self, threads: int) -> None:
        """Make room for `threads`; they are started when first needed."""
        self.threads = threads
        self._queue: SimpleQueue[_Job] = SimpleQueue()
        self._lock = Lock()
        self._started = False

    def run(self, function: Callable[..., None], tiles: int, args: list[Any], grain: int) -> None:
        """Run a kernel over the tiles 0 .. tiles-1, a thread for every `grain` of them; return when all is done."""
        pieces = min(self.threads, tiles // grain)
        if pieces < 2:
            function(c_int64(0), c_int64(tiles), *args)
            return
        if not self._started:
            self._start()
        job = _Job(function, tiles, args, pieces)
        for _ in range(pieces - 1):
            self._queue.put(job)
        job.help()
        job.wait()

    def _start(self) -> None:
        with self._lock:
            if not self._started:
                for index in range(1, self.threads):
                    Thread(target=_serve, args=(self._queue,), name=f"gpucomp-worker-{index}", daemon=True).start()
                self._started = True


def _serve(queue: SimpleQueue[_Job]) -> None:
    while True:
        queue.get().help()


_shared: Workers | None = None
_making = Lock()


def workers() -> Workers:
    """Return the process's workers."""
    global _shared
    if _shared is None:
        with _making:
            _shared = _shared or Workers(usable_cores())
    return _shared


def _forget() -> None:
    """Let a forked child make its own workers: it has none of its parent's threads."""
    global _shared, _making
    _shared, _making = None, Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
