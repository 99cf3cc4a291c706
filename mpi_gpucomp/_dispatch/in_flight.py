"""What is in flight on a communicator: kept alive until it completes, and completed or ended by Free.

A caller may drop the request of a passed-through call, but the MPI library still accesses its buffers.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from mpi_gpucomp._dispatch.p2p import RecvOperation
from mpi_gpucomp.engine.agreement import AgreementCheck
from mpi_gpucomp.engine.scheduling import Job
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.engine.engine import Engine
    from mpi_gpucomp.engine.progress import ProgressDriver
    from mpi_gpucomp.engine.scheduling import P2POperation
    from mpi_gpucomp.request import NativeRequest

__all__ = ["OpenRequests"]

SWEEP = 32
"""Passed-through calls that are kept before those that have completed are looked for."""
GRACE = 1.0
"""Seconds that Free waits for messages, once all ranks have called it and none is sent or received any more."""
FREE = "(communicator)"
"""The name under which the ranks agree on Free, in whatever order they have made their other calls."""
_leaked: list[NativeRequest | P2POperation] = []
"""Sends without a receive: MPI may still read their buffers, so they are kept for good."""


class OpenRequests:
    """The passed-through requests of one communicator that have not completed, and the end of everything on it."""

    def __init__(self, engine: Engine, driver: ProgressDriver) -> None:
        """Start with none."""
        self._engine, self._driver = engine, driver
        self._requests: list[NativeRequest] = []
        self._lock = threading.Lock()
        self._sweep_at = SWEEP

    def keep(self, request: NativeRequest, *, watched: bool = False) -> None:
        """Keep a request until it has completed; if `watched`, the progress thread completes it."""
        with self._lock:
            self._requests.append(request)
        if watched:
            with self._driver.lock:
                self._engine.p2p_operations.append(_WatchedRequest(request, self._engine))
            self._driver.wake()
        if len(self._requests) > self._sweep_at:
            self.sweep()

    def sweep(self) -> bool:
        """Complete the requests that the MPI library has completed; return True if none is left."""
        with self._lock:
            requests, self._requests = self._requests, []
        left = []
        for request in requests:
            if request.has_completed():
                request.complete()
            else:
                left.append(request)
        with self._lock:
            self._requests += left
            self._sweep_at = max(SWEEP, 2 * len(self._requests))
            return not self._requests

    def end(self) -> None:
        """Complete what is in flight, or end it with an error: collective."""
        self._agree()
        with self._driver.lock:
            self._engine.end_unjoined()
        self._driver.wait_until(self._calls_have_ended)
        self._wait(self._receives_have_ended)
        cancelled = self._cancel_receives()
        self._driver.wait_until(self._receives_have_ended)
        for receive in cancelled:
            if receive.is_cancelled:
                receive.error = self._unmatched("Irecv", "a matching send")
        self._agree()  # a send that is not matched now never will be
        self._wait(self._all_have_ended)
        self._end_sends()

    def _agree(self) -> None:
        """Wait until all ranks are here; raise if they have made different native calls, which may never complete."""
        signature = f"Free after native MPI calls {self._engine.deadlock.mpi_trace:016x}"
        job = Job(AgreementCheck("Free"), signature, name=FREE, everyone=True)
        self._driver.submit(job, background=False)
        job.waiters += 1
        self._driver.wait_until(lambda: (self.sweep(), job.finished)[1])
        if job.error is not None:
            raise job.error

    def _wait(self, ended: Callable[[], bool]) -> None:
        """Wait for messages, but not for ever."""
        until = time.monotonic() + GRACE
        self._driver.wait_until(lambda: ended() or time.monotonic() > until)

    def _calls_have_ended(self) -> bool:
        """Return True if no collective is in flight."""
        self.sweep()
        return self._engine.active_call is None and all(request.is_message for request in self._requests)

    def _receives_have_ended(self) -> bool:
        self.sweep()
        return not self._receives()

    def _all_have_ended(self) -> bool:
        return self.sweep() and not self._engine.p2p_operations

    def _receives(self) -> list[NativeRequest | RecvOperation]:
        """Return the receives in flight."""
        native = [request for request in self._requests if request.title == "Irecv"]
        framed = [one for one in self._engine.p2p_operations if isinstance(one, RecvOperation)]
        return [*native, *framed]

    def _cancel_receives(self) -> list[NativeRequest | RecvOperation]:
        """Cancel the receives that no message has matched; all ranks have sent what they will."""
        receives = self._receives()
        with self._driver.lock:
            for receive in receives:
                receive.cancel()
        return receives

    def _end_sends(self) -> None:
        """Give up the sends that no receive has matched."""
        for request in self._requests:
            request.error = self._unmatched(request.title, "a matching receive")
            _leaked.append(request)
        self._requests.clear()
        with self._driver.lock:
            for operation in self._engine.p2p_operations:
                operation.error, operation.done = self._unmatched("Isend", "a matching receive"), True
                _leaked.append(operation)
            self._engine.p2p_operations.clear()

    def _unmatched(self, title: str, other: str) -> SpecError:
        return SpecError(
            title,
            expected=f"{other} before Free",
            got="none when all ranks had called Free",
            remedy="Wait for messages before Free.",
            rank=self._engine.rank,
        )


class _WatchedRequest:
    """A passed-through call with a callback, as an operation that the engine polls."""

    def __init__(self, request: NativeRequest, engine: Engine) -> None:
        self._request, self._engine = request, engine
        self.title = request.title
        self.done = self.finished = False
        self.error: BaseException | None = None

    def progress(self) -> bool:
        """Return True if it has completed; its callback is then called outside of the lock."""
        self.done = self._request.has_completed()
        if self.done:
            self._engine.callbacks.append(self)
        return self.done

    def call_back(self) -> None:
        """Complete the request."""
        self._request.complete()
