"""Handles of what has been started: wait for one, for all of many, or look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpi_gpucomp.engine.progress import Backoff
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mpi_gpucomp._call.staging import Detour
    from mpi_gpucomp.engine.progress import ProgressDriver
    from mpi_gpucomp.engine.scheduling import Job

__all__ = ["PersistentRequest", "PlainRequest", "Request"]


class Request:
    """A collective that has been started."""

    _over = False

    def __init__(self, job: Job, driver: ProgressDriver, keep: object = None) -> None:
        """Keep what it works on alive."""
        self._job, self._driver, self._keep = job, driver, keep

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait until it is complete; raise what went wrong."""
        self._driver.wait(self._job)
        return self._finish()

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Say whether it is complete; raise what went wrong."""
        if not self._job.finished:
            self._driver.turn()
        return self._job.finished and self._finish()

    @property
    def active(self) -> bool:
        """Say whether nobody has waited for it yet, or found it complete."""
        return not self._over

    def _finish(self) -> bool:
        self._keep, self._over = None, True
        if self._job.error is not None:
            raise self._job.error
        return True

    @staticmethod
    def Waitall(requests: Sequence[Any], statuses: Any = None) -> bool:
        """Wait for all, ours and mpi4py's; if some fail, the error of the first is raised once all are over."""
        return _first_error(request.Wait for request in requests)

    @staticmethod
    def Testall(requests: Sequence[Any], statuses: Any = None) -> bool:
        """Say whether all are complete."""
        return all([request.Test() for request in requests])

    @staticmethod
    def Waitany(requests: Sequence[Any], status: Any = None) -> int:
        """Wait for one of those that are active, and return which; MPI.UNDEFINED if none is."""
        active = [number for number, request in enumerate(requests) if _is_active(request)]
        backoff = Backoff()
        while active:
            for number in active:
                if requests[number].Test(status):
                    return number
            backoff.rest()
        return MPI.UNDEFINED

    # With a small letter mpi4py returns the objects that have arrived: of a buffer there is none.

    def wait(self, status: MPI.Status | None = None) -> None:
        """Wait until it is complete; raise what went wrong."""
        self.Wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, None]:
        """Say whether it is complete; raise what went wrong."""
        return self.Test(status), None

    @staticmethod
    def waitall(requests: Sequence[Any], statuses: Any = None) -> list[None]:
        """Wait for all, as `Waitall` does."""
        Request.Waitall(requests, statuses)
        return [None] * len(requests)

    @staticmethod
    def testall(requests: Sequence[Any], statuses: Any = None) -> tuple[bool, list[None] | None]:
        """Say whether all are complete."""
        done = Request.Testall(requests, statuses)
        return done, [None] * len(requests) if done else None

    @staticmethod
    def waitany(requests: Sequence[Any], status: Any = None) -> tuple[int, None]:
        """Wait for one of those that are active, and return which."""
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


class PlainRequest(Request):
    """MPI's own request, and the meeting in which the ranks compare what they have called, if they do."""

    def __init__(
        self,
        request: MPI.Request,
        meeting: Job | None,
        driver: ProgressDriver,
        keep: object,
        detour: Detour | None,
        check_dead: Callable[[MPI.Exception], None] | None = None,
        callback: Callable[[], None] | None = None,
    ) -> None:
        """Be complete when both are, and what took a detour is back; `check_dead` knows what MPI's errors mean."""
        self._request, self._meeting, self._driver, self._keep, self._detour = request, meeting, driver, keep, detour
        self._check_dead, self._callback = check_dead, callback

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Compare first: MPI may wait for ever if the ranks have called different things."""
        if self._meeting is not None:
            self._driver.wait(self._meeting)
            self._compare(self._meeting)
        if self._driver.background:
            return self._ask(self._request.Wait, status) and self._land()
        # No thread goes on with what other ranks may wait for before they come to this.
        self._driver.wait_until(lambda: self._ask(self._request.Test, status))
        return self._land()

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Say whether both are complete."""
        if self._meeting is not None:
            if not self._meeting.finished:
                self._driver.turn()
            if not self._meeting.finished:
                return False
            self._compare(self._meeting)
        return self._ask(self._request.Test, status) and self._land()

    def _ask(self, question: Callable[[MPI.Status | None], bool], status: MPI.Status | None) -> bool:
        try:
            return question(status)
        except MPI.Exception as error:
            if self._check_dead is not None:
                self._check_dead(error)
            raise

    def _compare(self, meeting: Job) -> None:
        if meeting.error is not None:
            raise meeting.error
        self._meeting = None

    def _land(self) -> bool:
        detour, self._detour, self._keep, self._over = self._detour, None, None, True
        callback, self._callback = self._callback, None
        if detour is not None:
            detour.finish()
        if callback is not None:
            callback()
        return True


class PersistentRequest(Request):
    """A collective that can be started again and again on the same buffers."""

    def __init__(self, start: Callable[[], Request]) -> None:
        """Start nothing yet."""
        self._start: Callable[[], Request] | None = start
        self._active: Request | None = None

    def Start(self) -> None:
        """Start it, once the last time is complete."""
        if self._start is None or self._active is not None:
            raise SpecError(
                "persistent request",
                expected="one whose last start was waited for",
                got="one that is still active" if self._start else "one that was freed",
                remedy="Call Wait before the next Start.",
            )
        self._active = self._start()

    @property
    def active(self) -> bool:
        """Say whether it was started, and nobody has waited for it yet or found it complete."""
        return self._active is not None

    @staticmethod
    def Startall(requests: Sequence[Any]) -> None:
        """Start all, ours and mpi4py's."""
        for request in requests:
            request.Start()

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait until what was started last is complete."""
        active, self._active = self._active, None
        return active.Wait(status) if active is not None else True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Say whether what was started last is complete."""
        if self._active is not None and self._active.Test(status):
            self._active = None
        return self._active is None

    def Free(self) -> None:
        """Let go of the buffers."""
        self._start = None
