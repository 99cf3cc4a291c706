"""The processor as a device: a stream is a thread that works through its queue, and kernels release the GIL.

When queued work raises, what is queued behind it is skipped, and whoever waits behind it gets the exception; the rules
are in `lane.py`.
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
    "HostStream",
    "InlineStream",
    "Lane",
    "Workers",
    "start_thread",
    "usable_cores",
    "workers",
]


# The inside of a host stream: work in order, places in it that can be waited for, and failures.
#
# What happens when queued work raises: the stream skips what is queued behind it, and so does every stream that waits
# for an event recorded behind it. Each `Event.wait` and `Stream.synchronize` behind the failure raises the original
# exception. The first of them ends the failure in all the streams that it has reached: what is queued from then on
# runs.

EXIT_SECONDS = 2.0
"""How long the end of the interpreter waits for kernels that are still running."""


class _Failure:
    """What queued work raised, and the lanes that it holds up."""

    __slots__ = ("_error", "_lanes", "_trace")

    def __init__(self, error: BaseException, lane: Lane) -> None:
        # The first frame is the lane's own: it would keep the lane and its work alive in a circle.
        self._trace = error.__traceback__ and error.__traceback__.tb_next
        self._error = error.with_traceback(self._trace)
        self._lanes = [lane]

    def reach(self, lane: Lane) -> _Failure:
        """Hold up another lane."""
        self._lanes.append(lane)
        return self

    def throw(self) -> NoReturn:
        """End the failure in its lanes, behind what is queued there now, and raise it."""
        for lane in self._lanes:
            lane.put((lane.forget, self))
        raise self._error.with_traceback(self._trace)


class HostEvent(Event):
    """A place in a host stream; its gate is locked until the stream has passed."""

    __slots__ = ("_gate", "_passed", "failure")

    def __init__(self) -> None:
        """Start as not passed."""
        self.failure: _Failure | None = None
        self._passed = False
        self._gate = allocate_lock()
        self._gate.acquire()

    def done(self) -> bool:
        """Say whether the stream has passed this place; never waits."""
        return self._passed

    def wait(self) -> None:
        """Wait until the stream has passed this place; raise what went wrong before it."""
        self.settle()
        if self.failure is not None:
            self.failure.throw()

    def settle(self, seconds: float = -1) -> None:
        """Wait until the stream has passed, or for so many seconds, and leave its failure alone."""
        if not self._passed and self._gate.acquire(timeout=seconds):
            self._gate.release()

    def mark(self, failure: _Failure | None) -> None:
        """Let everybody pass who waits here."""
        self.failure, self._passed = failure, True
        self._gate.release()


class Lane:
    """The state of one stream: what it was given, in order, and the failure that it is in."""

    __slots__ = ("__weakref__", "_failure", "put")

    def __init__(self, put: Callable[[tuple[Any, ...]], None] | None = None) -> None:
        """Hand what is given to `put`, or run it at once."""
        self._failure: _Failure | None = None
        self.put = put or _run

    def work(self, function: Callable[..., object], *args: Any) -> None:
        """Run ordinary work, unless the lane has failed."""
        if self._failure is not None:
            return
        try:
            if _leaving:
                raise _interpreter_ends()
            function(*args)
        except BaseException as error:
            if self.put is _run and isinstance(error, KeyboardInterrupt):
                raise  # it is the caller's, who is right here
            self._failure = _Failure(error, self)

    def mark(self, event: HostEvent) -> None:
        """Pass an event."""
        event.mark(self._failure)

    def hold(self, event: HostEvent) -> None:
        """Wait for an event of another lane, and fail with it."""
        event.settle()
        if self._failure is None and event.failure is not None:
            self._failure = event.failure.reach(self)

    def forget(self, failure: _Failure) -> None:
        """Run again after this failure has been reported."""
        if self._failure is failure:
            self._failure = None


def _run(item: tuple[Any, ...]) -> None:
    item[0](*item[1:])


def start_thread(lane: Lane, queue: SimpleQueue[Any]) -> Thread:
    """Start the thread that works through a lane's queue until it finds None."""
    _lanes.add(lane)
    thread = Thread(target=_serve, args=(queue,), name="gpucomp-stream", daemon=True)
    thread.start()
    return thread


def _serve(queue: SimpleQueue[Any]) -> None:
    """Work through a queue until it says None; holds nothing of the stream, so that a dropped stream ends too."""
    item = queue.get()
    while item is not None:
        item[0](*item[1:])
        item = None  # or the last work's memory would live until the next work comes
        item = queue.get()


_lanes: WeakSet[Lane] = WeakSet()
_leaving = False


def _interpreter_ends() -> DeviceError:
    return DeviceError(
        "stream of host",
        expected="a running interpreter",
        got="one that is ending",
        remedy="Synchronise the streams before the program ends.",
    )


@atexit.register
def _leave() -> None:
    """Skip what is queued, and let running kernels end before their memory goes."""
    global _leaving
    _leaving = True
    places = []
    for lane in list(_lanes):
        places.append(HostEvent())
        lane.put((lane.mark, places[-1]))
    deadline = monotonic() + EXIT_SECONDS
    for place in places:
        place.settle(max(0.0, deadline - monotonic()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lanes.clear)  # a forked child has none of its parent's threads to wait for


# The threads that share the tiles of one kernel: one pool for all host streams of the process.
#
# A kernel's tiles are cut into contiguous pieces. The stream's own thread and the idle workers each take the next piece
# until none is left, so a stream never waits for a worker that is busy elsewhere. Workers run kernels alone and wait
# for nothing else; with nothing to do they sleep.


def usable_cores() -> int:
    """Return how many threads may share one kernel: the setting WORKERS, else the cores of this process."""
    if workers := config.WORKERS.get():
        return workers
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


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
                    Thread(
                        target=_workers_serve, args=(self._queue,), name=f"gpucomp-worker-{index}", daemon=True
                    ).start()
                self._started = True


def _workers_serve(queue: SimpleQueue[_Job]) -> None:
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


class InlineStream(Stream):
    """A stream that runs everything at once in the calling thread, and uses no other."""

    device: HostDevice

    def __init__(self, device: HostDevice) -> None:
        """Belong to `device`."""
        self.device = device
        self._lane = Lane()

    def _put(self, *item: Any) -> None:
        self._lane.put(item)

    def launch(self, kernel: str, tiles: int, *args: int | float, split: bool = True, grain: int = 64) -> None:
        """Run a kernel over all its tiles, in order."""
        self._put(self._lane.work, library.kernel(kernel), c_int64(0), c_int64(tiles), *library.arguments(args))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Queue a copy of bytes between two host addresses."""
        self._put(self._lane.work, memmove, to, source, nbytes)

    def fill(self, to: int, byte: int, nbytes: int) -> None:
        """Queue the setting of bytes to one value."""
        self._put(self._lane.work, memset, to, byte, nbytes)

    def run(self, work: Callable[[], None]) -> None:
        """Queue `work` itself."""
        self._put(self._lane.work, work)

    def release(self, memory: Memory) -> None:
        """Give memory back to its pool behind what is queued so far, also if that fails."""
        self._put(memory.release)

    def record(self) -> HostEvent:
        """Mark this place in the stream."""
        event = HostEvent()
        self._put(self._lane.mark, event)
        return event

    def wait(self, event: Event) -> None:
        """Hold later work until `event` is done."""
        if isinstance(event, HostEvent):
            self._put(self._lane.hold, event)
        else:
            self.run(event.wait)

    def synchronize(self) -> None:
        """Wait for everything queued so far; raise what went wrong."""
        self.record().wait()

    def close(self) -> None:
        """End the stream; raise what went wrong and nobody has asked for."""
        self.synchronize()


class HostStream(InlineStream):
    """A stream with a thread of its own, started by the first work; large kernels are shared with other cores."""

    def __init__(self, device: HostDevice) -> None:
        """Belong to `device`."""
        super().__init__(device)
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._lane = Lane(self._queue.put)
        self._thread: Thread | None = None
        self._starting = Lock()
        self._closed = False

    def _put(self, *item: Any) -> None:
        if self._thread is None:
            self._start()
        self._queue.put(item)

    def _start(self) -> None:
        with self._starting:
            if self._closed:
                raise DeviceError(
                    "stream of host",
                    expected="an open stream",
                    got="a closed one",
                    remedy="Make a new one with device.stream().",
                )
            if self._thread is None:
                self._thread = start_thread(self._lane, self._queue)

    def launch(self, kernel: str, tiles: int, *args: int | float, split: bool = True, grain: int = 64) -> None:
        """Queue a kernel over the tiles 0 .. tiles-1, shared with idle cores unless `split` is False."""
        if not split:
            super().launch(kernel, tiles, *args)
        else:
            self._put(self._lane.work, workers().run, library.kernel(kernel), tiles, library.arguments(args), grain)

    def synchronize(self) -> None:
        """Wait for everything queued so far; raise what went wrong."""
        if self._thread is not None:
            super().synchronize()

    def close(self) -> None:
        """Finish what is queued and end the thread; raise what went wrong and nobody has asked for."""
        try:
            self.synchronize()
        finally:
            thread, self._thread, self._closed = self._thread, None, True
            if thread is not None:
                self._queue.put(None)
                thread.join()

    def __del__(self) -> None:
        """End the thread of a stream that was dropped, behind what is queued."""
        if getattr(self, "_thread", None) is not None:
            self._queue.put(None)


class HostDevice(Device):
    """The processor and its memory."""

    name = "host"
    appends_in_place = True

    def __init__(self) -> None:
        """Start with an empty pool."""
        self.pool = Pool(self, _allocate)

    def alloc(self, nbytes: int) -> Memory:
        """Take memory from the pool, aligned for any kernel."""
        return self.pool.take(nbytes)

    def pinned(self, nbytes: int) -> Memory:
        """Take memory from the pool: on the host all memory is within reach."""
        return self.pool.take(nbytes)

    def stream(self, *, inline: bool = False) -> Stream:
        """Make a new stream; an inline one runs its work at once in the calling thread."""
        return InlineStream(self) if inline else HostStream(self)


def _allocate(nbytes: int) -> tuple[int, object]:
    owner = np.empty(nbytes + ALIGNMENT, np.uint8)
    return -(-owner.ctypes.data // ALIGNMENT) * ALIGNMENT, owner
