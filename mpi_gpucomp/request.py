"""Requests: handles of calls that were started."""

from __future__ import annotations

import ctypes
import threading
from functools import partial
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

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Return True if it has completed, and leave it active; only Wait and Test raise its error."""
        job = self._job
        if job is not None and not job.finished:
            self._driver.poll()
        return job is None or job.finished

    def Cancel(self) -> None:
        """Raise an error: MPI cancels messages alone, and of those receives."""
        raise SpecError(
            "Cancel",
            expected="the request of a message",
            got="that of a collective",
            remedy="Wait for it: other ranks count on this one.",
        )

    def __bool__(self) -> bool:
        """Return True until Wait or Test has found it completed."""
        return self.active

    def __eq__(self, other: object) -> bool:
        """Return True for itself; once it is inactive, also for MPI.REQUEST_NULL."""
        return other is self or (isinstance(other, MPI.Request) and other == MPI.REQUEST_NULL and not self)

    def __hash__(self) -> int:
        """Return a hash of its identity."""
        return id(self)

    @staticmethod
    def Waitall(requests: Sequence[Any], statuses: list[MPI.Status] | None = None) -> bool:
        """Wait for all, ours and mpi4py's; the first error is raised once all have ended."""
        filled = _statuses(statuses, len(requests))
        return _first_error(partial(request.Wait, status) for request, status in zip(requests, filled, strict=False))

    @staticmethod
    def Testall(requests: Sequence[Any], statuses: list[MPI.Status] | None = None) -> bool:
        """Return True if all have completed; if not, all stay active."""
        return all([request.Get_status() for request in requests]) and Request.Waitall(requests, statuses)

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

    @staticmethod
    def Testany(requests: Sequence[Any], status: MPI.Status | None = None) -> tuple[int, bool]:
        """Return an active request's index, or MPI.UNDEFINED, and True if it has completed or if none is active."""
        active = [number for number, request in enumerate(requests) if _is_active(request)]
        found = next((number for number in active if requests[number].Test(status)), MPI.UNDEFINED)
        return found, found != MPI.UNDEFINED or not active

    @staticmethod
    def Waitsome(requests: Sequence[Any], statuses: list[MPI.Status] | None = None) -> list[int] | None:
        """Wait for at least one of the active requests, and return the indices; None if none is active."""
        backoff = Backoff()
        while (found := Request.Testsome(requests, statuses)) == []:
            backoff.rest()
        return found

    @staticmethod
    def Testsome(requests: Sequence[Any], statuses: list[MPI.Status] | None = None) -> list[int] | None:
        """Return the indices of the active requests that have completed; None if none is active."""
        active = [number for number, request in enumerate(requests) if _is_active(request)]
        found = [number for number in active if requests[number].Get_status()]
        Request.Waitall([requests[number] for number in found], statuses)
        return found if active else None

    # mpi4py's lower-case forms return the received objects: of a buffer there is none.

    def wait(self, status: MPI.Status | None = None) -> None:
        """Wait until it has completed; raise its error."""
        self.Wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, None]:
        """Return True if it has completed; raise its error."""
        return self.Test(status), None

    def get_status(self, status: MPI.Status | None = None) -> bool:
        """Return True if it has completed, and leave it active."""
        return self.Get_status(status)

    def cancel(self) -> None:
        """Cancel a receive, unless it is matched."""
        self.Cancel()

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

    @staticmethod
    def testany(requests: Sequence[Any], status: Any = None) -> tuple[int, bool, None]:
        """Return the index of an active request that has completed, and True."""
        return *Request.Testany(requests, status), None

    @staticmethod
    def waitsome(requests: Sequence[Any], statuses: Any = None) -> tuple[list[int] | None, list[None] | None]:
        """Wait for at least one of the active requests, and return the indices."""
        found = Request.Waitsome(requests, statuses)
        return found, None if found is None else [None] * len(found)

    @staticmethod
    def testsome(requests: Sequence[Any], statuses: Any = None) -> tuple[list[int] | None, list[None] | None]:
        """Return the indices of the active requests that have completed."""
        found = Request.Testsome(requests, statuses)
        return found, None if found is None else [None] * len(found)


def _statuses(statuses: list[MPI.Status] | None, count: int) -> list[Any]:
    """Return a status for each request, in a list that is extended if it is too short; None if none are wanted."""
    if statuses is None:
        return [None] * count
    statuses += [MPI.Status() for _ in range(len(statuses), count)]
    return statuses


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
        self._completed = False
        """True once nothing is left to do; it stays active until its caller knows."""
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
        return self._end()

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return True if it has completed; raise its error."""
        if not self._is_issued():
            self._driver.poll()
        return self._is_issued() and self._query("Test", status) and self._end()

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

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Return True if it has completed, and leave it active."""
        if not self._is_issued():
            self._driver.poll()
        with self._lock:
            if self._request is None or self._has_ended:
                _copy_status(self._status, status)
                return self._has_ended
            return self._request.Get_status(status)

    def Cancel(self) -> None:
        """Cancel a receive, unless it is matched; it completes, and the status of Wait tells."""
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
        return self._completed or self.error is not None or self._status is not None

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

    def _end(self) -> bool:
        self._inactive = True
        self._complete()
        return True

    def _complete(self) -> None:
        with self._lock:
            staging, self._staging, self._keep, self._completed = self._staging, None, None, True
            callback, self._callback = self._callback, None
            if staging is not None:
                staging.finish()
            if callback is not None:
                callback()
            if self.error is not None:  # of the callback, in another thread
                raise self.error


def _copy_status(source: MPI.Status | None, to: MPI.Status | None) -> None:
    if source is not None and to is not None:
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

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Return True if the last start has completed."""
        return self._active is None or self._active.Get_status(status)

    def Cancel(self) -> None:
        """Cancel the last start, if it is that of a receive."""
        if self._active is not None:
            self._active.Cancel()

    def __bool__(self) -> bool:
        """Return True until it is freed."""
        return self._start is not None

    def Free(self) -> None:
        """Release the buffers."""
        self._start = None
