"""The inside of a host stream: work in order, places in it that can be waited for, and failures.

What happens when queued work raises: the stream skips what is queued behind it, and so does every stream that waits
for an event recorded behind it. Each `Event.wait` and `Stream.synchronize` behind the failure raises the original
exception. The first of them ends the failure in all the streams that it has reached: what is queued from then on runs.
"""

from __future__ import annotations

import atexit
import os
from _thread import allocate_lock
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

from mpi_gpucomp.device.base import Event
from mpi_gpucomp.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from queue import SimpleQueue

__all__ = ["HostEvent", "Lane", "start_thread"]

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
