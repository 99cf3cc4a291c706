"""Requests: handles of calls that were started."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpi_gpucomp.engine.progress import Backoff
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mpi_gpucomp._call.staging import HostStaging
    from mpi_gpucomp.engine.progress import ProgressDriver
    from mpi_gpucomp.engine.scheduling import Job

__all__ = ["NativeRequest", "PersistentRequest", "Request"]


class Request:
    """A collective that was started."""

    _inactive = False

    def __init__(self, job: Job, driver: ProgressDriver, keep: object = None) -> None:
        """Keep the buffers of the call alive."""
        self._job: Job | None = job
        self._driver, self._keep = driver, keep
        self.error: BaseException | None = None
        """Why it has failed, once that is known."""

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait until it has completed; raise its error."""
        if self._job is not None:
            self._driver.wait(self._job)
        return self._finish()

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return True if it has completed; raise its error."""
        job = self._job
        if job is not None and not job.finished:
            self._driver.poll()
        return (job is None or job.finished) and self._finish()

    @property
    def active(self) -> bool:
        """Return True until Wait or Test has found it completed."""
        return not self._inactive

    def _finish(self) -> bool:
        job = self._job
        if job is not None:
            # The job holds the buffers too: from here on the caller may resize them.
            self.error, self._job, self._keep, self._inactive = job.error, None, None, True
        if self.error is not None:
            raise self.error
        return True

    @staticmethod
    def Waitall(requests: Sequence[Any], statuses: Any = None) -> bool:
        """Wait for all, ours and mpi4py's; the first error is raised once all have ended."""
        return _first_error(request.Wait for request in requests)

    @staticmethod
    def Testall(requests: Sequence[Any], statuses: Any = None) -> bool:
        """Return True if all have completed."""
        return all([request.Test() for request in requests])

    @staticmethod
    def Waitany(requests: Sequence[Any], status: Any = None) -> int:
        """Wait for one of the active requests and return its index; MPI.UNDEFINED if none is active."""
        active = [number for number, request in enumerate(requests) if _is_active(request)]
        backoff = Backoff()
        while active:
            for number in active:
                if requests[number].Test(status):
                    return number
            backoff.rest()
        return MPI.UNDEFINED

    # mpi4py's lower-case forms return the received objects: of a buffer there is none.

    def wait(self, status: MPI.Status | None = None) -> None:
        """Wait until it has completed; raise its error."""
        self.Wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, None]:
        """Return True if it has completed; raise its error."""
        return self.Test(status), None

    @staticmethod
    def waitall(requests: Sequence[Any], statuses: Any = None) -> list[None]:
        """Wait for all, as `Waitall` does."""
        Request.Waitall(requests, statuses)
        return [None] * len(requests)

    @staticmethod
    def testall(requests: Sequence[Any], statuses: Any = None) -> tuple[bool, list[None] | None]:
        """Return True if all have completed."""
        done = Request.Testall(requests, statuses)
        return done, [None] * len(requests) if done else None

    @staticmethod
    def waitany(requests: Sequence[Any], status: Any = None) -> tuple[int, None]:
        """Wait for one of the active requests and return its index."""
        return Request.Waitany(requests, status), None


def _is_active(request: Any) -> bool:
    return request.active if isinstance(request, Request) else request != MPI.REQUEST_NULL


def _first_error(calls: Iterable[Any]) -> bool:
    first: Exception | None = None
    for call in calls:
        try:
            call()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first
    return True


class NativeRequest(Request):
    """A passed-through call: completed when the MPI library's request is, and staged buffers are copied back.

    Its communicator keeps it until then, so that a dropped request does not take its buffers away from MPI, and may
    find it completed before its caller does.
    """

    def __init__(
        self,
        driver: ProgressDriver,
        keep: object,
        staging: HostStaging | None,
        check_dead: Callable[[MPI.Exception], None] | None = None,
        callback: Callable[[], None] | None = None,
        title: str = "",
    ) -> None:
        """Wait for `issued` or an `error`; `check_dead` translates MPI's errors."""
        self._driver, self._keep, self._staging = driver, keep, staging
        self._check_dead, self._callback, self.title = check_dead, callback, title
        self._request: MPI.Request | None = None
        self.error: BaseException | None = None
        self._status: MPI.Status | None = None
        """What the MPI library returned, if it was not the caller who found the request completed."""
        self._lock = threading.RLock()
        """MPI must not get a request from two threads at a time, and Wait returns after the callback."""

    def issued(self, request: MPI.Request) -> NativeRequest:
        """Take the MPI library's request."""
        self._request = request
        return self

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait until it has completed; raise its error."""
        if not self._is_issued():
            self._driver.wait_until(self._is_issued)
        if self._driver.background:
            self._query("Wait", status)
        else:
            # No thread drives what other ranks may be waiting for before they get here.
            self._driver.wait_until(lambda: self._query("Test", status))
        return self._complete()

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return True if it has completed; raise its error."""
        if not self._is_issued():
            self._driver.poll()
        return self._is_issued() and self._query("Test", status) and self._complete()

    def has_completed(self) -> bool:
        """Return True if it has ended; never block, and leave a caller alone that is blocked in it."""
        if self._request is None or not self._lock.acquire(blocking=False):
            return self.error is not None
        try:
            if not self._has_ended:
                status = MPI.Status()
                if self._request.Test(status):
                    self._status = status
        except MPI.Exception as error:
            self.error = error
        finally:
            self._lock.release()
        return self._has_ended

    def complete(self) -> None:
        """Do what is left once it `has_completed`: its caller may never wait for it."""
        try:
            if self.error is None:
                self._complete()
        except Exception as error:  # for its caller, who may still wait
            self.error = error

    def cancel(self) -> None:
        """Cancel a receive, unless it is matched; it completes, and `is_cancelled` tells."""
        with self._lock:
            if self._request is not None and not self._has_ended:
                self._request.Cancel()

    @property
    def is_cancelled(self) -> bool:
        """Return True if it was cancelled before a message matched it."""
        return self._status is not None and self._status.Is_cancelled()

    @property
    def is_message(self) -> bool:
        """Return True for a point-to-point message."""
        return self.title in ("Isend", "Irecv")

    @property
    def _has_ended(self) -> bool:
        return self._inactive or self.error is not None or self._status is not None

    def _is_issued(self) -> bool:
        return self._request is not None or self.error is not None

    def _query(self, method: str, status: MPI.Status | None) -> bool:
        with self._lock:
            if self.error is not None:
                self._inactive, self._keep = True, None
                if isinstance(self.error, MPI.Exception) and self._check_dead is not None:
                    self._check_dead(self.error)
                raise self.error
            if self._status is not None:
                _copy_status(self._status, status)
                return True
            try:
                done: bool = getattr(self._request, method)(status)
            except MPI.Exception as error:
                if self._check_dead is not None:
                    self._check_dead(error)
                raise
            return done

    def _complete(self) -> bool:
        with self._lock:
            staging, self._staging, self._keep, self._inactive = self._staging, None, None, True
            callback, self._callback = self._callback, None
            if staging is not None:
                staging.finish()
            if callback is not None:
                callback()
            if self.error is not None:  # of the callback, in another thread
                raise self.error
        return True


def _copy_status(source: MPI.Status, to: MPI.Status | None) -> None:
    if to is not None:
        ctypes.memmove(MPI._addressof(to), MPI._addressof(source), MPI._sizeof(source))


class PersistentRequest(Request):
    """A collective that can be started repeatedly on the same buffers."""

    def __init__(self, start: Callable[[], Request]) -> None:
        """Start nothing yet."""
        self._start: Callable[[], Request] | None = start
        self._active: Request | None = None

    def Start(self) -> None:
        """Start it, once the previous start has completed."""
        if self._start is None or self._active is not None:
            raise SpecError(
                "persistent request",
                expected="an inactive request",
                got="one that is still active" if self._start else "one that was freed",
                remedy="Call Wait before the next Start.",
            )
        self._active = self._start()

    @property
    def active(self) -> bool:
        """Return True from Start until Wait or Test has found it completed."""
        return self._active is not None

    @staticmethod
    def Startall(requests: Sequence[Any]) -> None:
        """Start all, ours and mpi4py's."""
        for request in requests:
            request.Start()

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait until the last start has completed."""
        active, self._active = self._active, None
        return active.Wait(status) if active is not None else True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return True if the last start has completed."""
        if self._active is not None and self._active.Test(status):
            self._active = None
        return self._active is None

    def Free(self) -> None:
        """Release the buffers."""
        self._start = None
