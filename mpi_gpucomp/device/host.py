"""The host as a device: a stream is a thread with a queue, and kernels run outside the GIL.

Failures: when queued work raises, the stream skips the work queued behind it, and so does every stream that waits for
an event recorded behind it. Each `Event.wait` and `Stream.synchronize` behind the failure raises the original
exception. The first of them clears the failure in every stream that it has reached: work queued from then on runs.

A kernel's tiles are cut into contiguous ranges. The stream's thread and the idle threads of one `Workers` pool per
process each take the next range until none is left, so a stream never waits for a worker that is busy elsewhere.
"""

from __future__ import annotations

import atexit
import os
from _thread import allocate_lock
from ctypes import c_int64, memmove, memset
from itertools import count
from queue import SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

import numpy as np

from mpi_gpucomp import config
from mpi_gpucomp.device import library
from mpi_gpucomp.device.base import Device, Event, Memory, Stream
from mpi_gpucomp.device.pool import ALIGNMENT, Pool
from mpi_gpucomp.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "HostDevice",
    "HostEvent",
    "HostQueue",
    "HostStream",
    "InlineStream",
    "Workers",
    "shared_workers",
    "usable_cores",
]

EXIT_SECONDS = 2.0
"""How long the exit of the interpreter waits for kernels that are still running."""


class HostDevice(Device):
    """The processor and its memory."""

    name = "host"
    appends_in_place = True

    def __init__(self) -> None:
        """Start with an empty pool."""
        self.pool = Pool(self, _allocate)

    def alloc(self, nbytes: int) -> Memory:
        """Allocate memory from the pool, aligned for any kernel."""
        return self.pool.take(nbytes)

    def pinned(self, nbytes: int) -> Memory:
        """Allocate memory from the pool: host kernels access all of it."""
        return self.pool.take(nbytes)

    def stream(self, *, inline: bool = False) -> Stream:
        """Create a stream; an inline one runs its work immediately in the calling thread."""
        return InlineStream(self) if inline else HostStream(self)


def _allocate(nbytes: int) -> tuple[int, object]:
    owner = np.empty(nbytes + ALIGNMENT, np.uint8)
    return -(-owner.ctypes.data // ALIGNMENT) * ALIGNMENT, owner


class InlineStream(Stream):
    """A stream that runs everything immediately, in the calling thread alone."""

    device: HostDevice

    def __init__(self, device: HostDevice) -> None:
        """Create a stream of `device`."""
        self.device = device
        self._queue = HostQueue()

    def _put(self, *item: Any) -> None:
        self._queue.put(item)

    def launch(self, kernel: str, tiles: int, *args: int | float, split: bool = True, grain: int = 64) -> None:
        """Run a kernel over all its tiles, in order."""
        self._put(self._queue.work, library.kernel(kernel), c_int64(0), c_int64(tiles), *library.arguments(args))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Queue a copy of bytes between two host addresses."""
        self._put(self._queue.work, memmove, to, source, nbytes)

    def fill(self, to: int, byte: int, nbytes: int) -> None:
        """Queue a memset."""
        self._put(self._queue.work, memset, to, byte, nbytes)

    def run(self, work: Callable[[], None]) -> None:
        """Queue `work` itself."""
        self._put(self._queue.work, work)

    def release(self, memory: Memory) -> None:
        """Return memory to its pool behind the work queued so far, even if that fails."""
        self._put(memory.release)

    def record(self) -> HostEvent:
        """Record an event at the current end of the stream."""
        event = HostEvent()
        self._put(self._queue.pass_event, event)
        return event

    def wait(self, event: Event) -> None:
        """Make later work wait for `event`."""
        if isinstance(event, HostEvent):
            self._put(self._queue.wait_event, event)
        else:
            self.run(event.wait)

    def synchronize(self) -> None:
        """Block until all work queued so far has completed; raise if any of it failed."""
        self.record().wait()

    def close(self) -> None:
        """End the stream; raise a failure that was not reported yet."""
        self.synchronize()


class HostStream(InlineStream):
    """A stream with its own thread, started by the first work; large kernels are shared with the workers."""

    def __init__(self, device: HostDevice) -> None:
        """Create a stream of `device`."""
        super().__init__(device)
        self._items: SimpleQueue[Any] = SimpleQueue()
        self._queue = HostQueue(self._items.put)
        self._thread: Thread | None = None
        self._starting = Lock()
        self._closed = False

    def _put(self, *item: Any) -> None:
        if self._thread is None:
            self._start()
        self._items.put(item)

    def _start(self) -> None:
        with self._starting:
            if self._closed:
                raise DeviceError(
                    "stream of host",
                    expected="an open stream",
                    got="a closed one",
                    remedy="Create another with device.stream().",
                )
            if self._thread is None:
                _queues.add(self._queue)
                self._thread = Thread(target=_drain, args=(self._items,), name="gpucomp-stream", daemon=True)
                self._thread.start()

    def launch(self, kernel: str, tiles: int, *args: int | float, split: bool = True, grain: int = 64) -> None:
        """Queue a kernel over the tiles 0 .. tiles-1, shared with idle cores unless `split` is False."""
        if not split:
            super().launch(kernel, tiles, *args)
            return
        function, numbers = library.kernel(kernel), library.arguments(args)
        self._put(self._queue.work, shared_workers().run, function, tiles, numbers, grain)

    def synchronize(self) -> None:
        """Block until all work queued so far has completed; raise if any of it failed."""
        if self._thread is not None:
            super().synchronize()

    def close(self) -> None:
        """Complete the queued work and end the thread; raise a failure that was not reported yet."""
        try:
            self.synchronize()
        finally:
            thread, self._thread, self._closed = self._thread, None, True
            if thread is not None:
                self._items.put(None)
                thread.join()

    def __del__(self) -> None:
        """End the thread of a dropped stream, behind the work queued so far."""
        if getattr(self, "_thread", None) is not None:
            self._items.put(None)


def _drain(items: SimpleQueue[Any]) -> None:
    """Run the items of a queue until None; holds no reference to the stream, so that a dropped one ends too."""
    item = items.get()
    while item is not None:
        item[0](*item[1:])
        item = None  # or the memory of the last work would live until the next work arrives
        item = items.get()


class HostEvent(Event):
    """A position in a host stream; its gate is locked until the stream has passed it."""

    __slots__ = ("_gate", "_passed", "failure")

    def __init__(self) -> None:
        """Create an event that has not been passed."""
        self.failure: _Failure | None = None
        self._passed = False
        self._gate = allocate_lock()
        self._gate.acquire()

    def done(self) -> bool:
        """Return True if the stream has passed this position; never blocks."""
        return self._passed

    def wait(self) -> None:
        """Block until the stream has passed this position; raise if earlier work failed."""
        self.wait_passed()
        if self.failure is not None:
            self.failure.report()

    def wait_passed(self, seconds: float = -1) -> None:
        """Block until the stream has passed this position or the timeout expires; do not report its failure."""
        if not self._passed and self._gate.acquire(timeout=seconds):
            self._gate.release()

    def set_passed(self, failure: _Failure | None) -> None:
        """Wake every waiter; `failure` is the stream's at this position."""
        self.failure, self._passed = failure, True
        self._gate.release()


class HostQueue:
    """The state of one host stream: where its items go, and the failure that makes it skip work."""

    __slots__ = ("__weakref__", "_failure", "put")

    def __init__(self, put: Callable[[tuple[Any, ...]], None] | None = None) -> None:
        """Pass items (a function and its arguments) to `put`, or run them immediately."""
        self._failure: _Failure | None = None
        self.put = put or _run_item

    def work(self, function: Callable[..., object], *args: Any) -> None:
        """Run one item of work, unless earlier work has failed."""
        if self._failure is not None:
            return
        try:
            if _exiting:
                raise DeviceError(
                    "stream of host",
                    expected="a running interpreter",
                    got="one that is shutting down",
                    remedy="Synchronise the streams before the program ends.",
                )
            function(*args)
        except BaseException as error:
            if self.put is _run_item and isinstance(error, KeyboardInterrupt):
                raise  # an inline stream runs in the thread that was interrupted
            self._failure = _Failure(error, self)

    def pass_event(self, event: HostEvent) -> None:
        """Mark an event of this stream as passed."""
        event.set_passed(self._failure)

    def wait_event(self, event: HostEvent) -> None:
        """Wait for an event of another stream, and take over its failure."""
        event.wait_passed()
        if self._failure is None and event.failure is not None:
            self._failure = event.failure
            self._failure.queues.append(self)

    def clear(self, failure: _Failure) -> None:
        """Run work again after this failure has been reported."""
        if self._failure is failure:
            self._failure = None


def _run_item(item: tuple[Any, ...]) -> None:
    item[0](*item[1:])


class _Failure:
    """The exception of queued work, and the queues that skip work because of it."""

    __slots__ = ("_error", "_trace", "queues")

    def __init__(self, error: BaseException, queue: HostQueue) -> None:
        # The first frame is the queue's own: it would keep the queue and its work alive in a reference cycle.
        self._trace = error.__traceback__ and error.__traceback__.tb_next
        self._error = error.with_traceback(self._trace)
        self.queues = [queue]

    def report(self) -> NoReturn:
        """Clear the failure in its queues, behind the work queued there now, and raise it."""
        for queue in self.queues:
            queue.put((queue.clear, self))
        raise self._error.with_traceback(self._trace)


_queues: WeakSet[HostQueue] = WeakSet()
_exiting = False


@atexit.register
def _exit() -> None:
    """Skip queued work, and let running kernels complete before their memory is freed."""
    global _exiting
    _exiting = True
    events = []
    for queue in list(_queues):
        events.append(HostEvent())
        queue.put((queue.pass_event, events[-1]))
    deadline = monotonic() + EXIT_SECONDS
    for event in events:
        event.wait_passed(max(0.0, deadline - monotonic()))


def usable_cores() -> int:
    """Return the number of threads that share one kernel: the setting WORKERS, or the cores of this process."""
    if workers := config.WORKERS.get():
        return workers
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class Workers:
    """A pool of threads, the caller's included, that share the tiles of kernels; idle ones sleep."""

    def __init__(self, threads: int) -> None:
        """Use up to `threads` threads; they are started when first needed."""
        self.threads = threads
        self._launches: SimpleQueue[_Launch] = SimpleQueue()
        self._lock = Lock()
        self._started = False

    def run(self, function: Callable[..., None], tiles: int, args: list[Any], grain: int) -> None:
        """Run a kernel over the tiles 0 .. tiles-1, one thread for every `grain` of them; block until it completes."""
        ranges = min(self.threads, tiles // grain)
        if ranges < 2:
            function(c_int64(0), c_int64(tiles), *args)
            return
        if not self._started:
            self._start()
        launch = _Launch(function, tiles, args, ranges)
        for _ in range(ranges - 1):
            self._launches.put(launch)
        launch.run_ranges()
        launch.wait()

    def _start(self) -> None:
        with self._lock:
            if not self._started:
                for index in range(1, self.threads):
                    name = f"gpucomp-worker-{index}"
                    Thread(target=_serve_launches, args=(self._launches,), name=name, daemon=True).start()
                self._started = True


def _serve_launches(launches: SimpleQueue[_Launch]) -> None:
    while True:
        launches.get().run_ranges()


class _Launch:
    """One kernel whose tiles are cut into ranges that threads claim one by one."""

    __slots__ = ("_args", "_completed", "_error", "_function", "_gate", "_next", "_ranges", "_tiles")

    def __init__(self, function: Callable[..., None], tiles: int, args: list[Any], ranges: int) -> None:
        self._function, self._tiles, self._args, self._ranges = function, tiles, args, ranges
        self._error: BaseException | None = None
        self._next, self._completed = count(), count(1)
        self._gate = allocate_lock()
        self._gate.acquire()

    def run_ranges(self) -> None:
        """Run ranges until all are claimed; the thread that completes the last one opens the gate."""
        while (index := next(self._next)) < self._ranges:
            first, last = self._tiles * index // self._ranges, self._tiles * (index + 1) // self._ranges
            try:
                self._function(c_int64(first), c_int64(last), *self._args)
            except BaseException as error:
                self._error = error
            if next(self._completed) == self._ranges:
                self._gate.release()

    def wait(self) -> None:
        """Block until every range has completed; raise if one failed."""
        self._gate.acquire()
        if self._error is not None:
            raise self._error


_workers: Workers | None = None
_workers_lock = Lock()


def shared_workers() -> Workers:
    """Return the process's workers."""
    global _workers
    if _workers is None:
        with _workers_lock:
            _workers = _workers or Workers(usable_cores())
    return _workers


def _after_fork() -> None:
    """Reset the threads in a forked child, which has none of its parent's."""
    global _workers, _workers_lock
    _workers, _workers_lock = None, Lock()
    _queues.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
