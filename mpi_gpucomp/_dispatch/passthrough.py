"""Pass-through: calls handed to the MPI library's own collectives.

The first call of each class is compared among all ranks before any of them enters MPI, where a mismatch would hang or
corrupt memory. A non-blocking call must not wait for that comparison, so it is deferred: the MPI library gets it when
the comparison has succeeded. Deferred calls and those behind them keep their program order, as MPI requires of the
collectives on one communicator. Later calls of the class are only added to a rolling hash, which the ranks compare the
next time that they meet.
"""

from __future__ import annotations

import sys
import threading
import time
import zlib
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from mpi4py import MPI

from mpi_gpucomp._call.staging import HostStaging, mpi4py_accepts, mpi_reaches_gpu
from mpi_gpucomp.engine.agreement import AgreementCheck
from mpi_gpucomp.engine.scheduling import Job
from mpi_gpucomp.request import NativeRequest, Request
from mpi_gpucomp.transport.mpi import lost, means_death

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp._call.balance import Balance
    from mpi_gpucomp._call.calls import Call
    from mpi_gpucomp._dispatch.in_flight import OpenRequests
    from mpi_gpucomp._dispatch.plan import Lifetime, Plan
    from mpi_gpucomp._tuning.mpi_algorithms import TunedComm
    from mpi_gpucomp.engine.engine import Engine
    from mpi_gpucomp.engine.progress import ProgressDriver

__all__ = ["FastPath", "Passthrough", "method_salt"]

FastPath: TypeAlias = "dict[tuple[int, str, int], tuple[MPI.Intracomm, Lifetime]]"

REVOKE_SECONDS = 1.0
"""How long a native call may take to return once it was revoked; an MPI without ULFM ignores the revocation."""


@cache
def method_salt(title: str) -> int:
    """Return what distinguishes a method in the rolling hash of passed-through calls."""
    return zlib.crc32(title.encode()) & 0xFFFF


@dataclass(slots=True)
class _Check:
    """The comparison of a call among all ranks."""

    job: Job
    done: bool = False


@dataclass(slots=True)
class _Deferred:
    """A non-blocking call that the MPI library has not got yet."""

    check: _Check | None
    """The comparison that it depends on, its own or that of an earlier call of its class."""
    compares: bool
    """True if the comparison is its own."""
    issue: Callable[[], MPI.Request]
    request: NativeRequest


class Passthrough:
    """The passed-through calls of one communicator."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        engine: Engine,
        driver: ProgressDriver,
        derived_comms: list[MPI.Intracomm],
        in_flight: OpenRequests,
        balance: Balance,
        *,
        on_rails: bool,
    ) -> None:
        """Take `comm` for exclusive use; `derived_comms` are revoked with it.

        With rails, what can do without the MPI library does.
        """
        self._in_flight, self._balance = in_flight, balance
        self._comm, self._engine, self._driver, self._on_rails = comm, engine, driver, on_rails
        self.derived_comms = derived_comms
        self._detector = engine.deadlock
        engine.deadlock.on_mpi_hang = self._on_mpi_hang
        self._agreed: set[object] = set()
        """Classes of calls that all ranks have compared, or are comparing."""
        self._checks: dict[object, _Check] = {}
        """Comparisons in flight, by class."""
        self._deferred: deque[_Deferred] = deque()
        self._lock = threading.RLock()
        self._tuned: dict[str, list[TunedComm]] = {}
        self.fast_path: FastPath = {}
        """Calls on numpy arrays that may bypass dispatch: (nbytes, dtype, root or op) -> communicator and lifetime."""

    def add_tuned_comm(self, method: str, tuned: TunedComm) -> None:
        """Use another communicator for a range of message sizes from now on: collective."""
        self._tuned.setdefault(method, []).append(tuned)
        self.derived_comms.append(tuned.comm)
        self.fast_path.clear()

    def comm_for(self, call: Call, plan: Plan) -> MPI.Intracomm:
        """Return the communicator to make a call on."""
        if plan.comm is not None:
            return plan.comm
        nbytes = 0 if call.unsupported else call.nbytes
        return next((one.comm for one in self._tuned.get(call.method, ()) if one.covers(nbytes)), self._comm)

    # Blocking calls

    def run(self, call: Call, plan: Plan) -> MPI.Intracomm:
        """Make a blocking call, and return the communicator that it was made on."""
        self._issue_deferred()
        check = self._new_check(call, plan)
        if check is not None:
            self._complete(check.job)
            self._detector.mpi_calls += 1
        else:
            if _may_differ_in_counts(call):
                self._compare_counts(call, plan)
            self._detector.count_mpi_call(_extent(call))
        comm = self.comm_for(call, plan)
        if mpi4py_accepts(call):
            self._call(call.method, call.args, comm)
            return comm
        staging = HostStaging(call, reaches_gpu=mpi_reaches_gpu(blocking=True))
        try:
            self._call(call.method, staging.args, comm)
        finally:
            staging.finish()
        return comm

    def _call(self, method: str, args: tuple[Any, ...], comm: MPI.Intracomm) -> None:
        """Call MPI; without a progress thread, drive the engine meanwhile.

        Then all ranks make the non-blocking call: MPI does not match it with a blocking one.
        """
        if self._driver.background:
            self._detector.in_mpi_call = method
            try:
                getattr(comm, method)(*args)
            finally:
                self._detector.in_mpi_call = None
            return
        request = getattr(self._comm, f"I{method.lower()}")(*args)
        while not request.Test():
            self._driver.poll()

    def _compare_counts(self, call: Call, plan: Plan) -> None:
        """Raise on all ranks if two of them count differently, which MPI would not notice on most ranks."""
        total = np.array([self._balance.of(call)], np.int64).view(np.uint64)
        self._call("Allreduce", (MPI.IN_PLACE, total), self._comm)
        if total[0]:
            self._complete(self._comparison(call.title, plan.signature(call), call))

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self._on_rails:
            self._complete(Job(AgreementCheck("Barrier"), "Barrier", everyone=True))
            return
        self._issue_deferred()
        if self._comm.size > 1 and "Barrier" not in self._agreed:
            self._agreed.add("Barrier")
            check = self._make_check("Barrier", "Barrier", "Barrier")
            self._complete(check.job)
            self._detector.mpi_calls += 1
        else:
            self._detector.count_mpi_call(method_salt("Barrier"))
        try:
            self._call("Barrier", (), self._comm)
        except MPI.Exception as error:
            self.check_dead(error)
            raise

    # Non-blocking calls

    def start(self, call: Call, plan: Plan) -> Request:
        """Start a non-blocking call, deferred while the ranks compare it or an earlier one."""
        with self._lock:  # a comparison that fails meanwhile must not go unnoticed
            own = self._new_check(call, plan)
            check = own or self._checks.get(_class_of(call, plan))
        # In the caller's thread, which the streams of its buffers belong to.
        staging = None if mpi4py_accepts(call) else HostStaging(call, reaches_gpu=mpi_reaches_gpu(blocking=False))
        args = call.args if staging is None else staging.args
        callback = self.callback_of(call)
        request = NativeRequest(self._driver, (call, args), staging, self.check_dead, callback, call.title)
        self._in_flight.keep(request, watched=callback is not None)
        deferred = _Deferred(check, own is not None, lambda: getattr(self._comm, call.title)(*args), request)
        if own is None:
            self._detector.count_mpi_call(_extent(call))
        with self._lock:
            if check is None and not self._deferred:
                request.issued(deferred.issue())
                return request
            self._deferred.append(deferred)
            self.fast_path.clear()  # calls that bypass dispatch would overtake it
            self._advance()  # the comparison may have completed since it was looked up
        if own is not None:
            self._driver.submit(own.job)
        return request

    def _issue_deferred(self) -> None:
        """Wait until the MPI library has all earlier calls."""
        if self._deferred:
            self._driver.wait_until(lambda: not self._deferred)

    def _advance(self) -> None:
        """Hand deferred calls to the MPI library, in program order, up to one that is still being compared."""
        while self._deferred:
            head = self._deferred[0]
            if head.check is not None and not head.check.done:
                return
            self._deferred.popleft()
            error = head.check.job.error if head.check is not None else None
            try:
                if error is None:
                    head.request.issued(head.issue())
                    self._detector.mpi_calls += head.compares
            except Exception as failed:
                error = failed
            if error is not None:
                head.request.error = error

    def callback_of(self, call: Call) -> Callable[[], None] | None:
        """Return the call's callback; if it raises, the other ranks get an error in their next call."""
        callback = call.options.get("callback")
        if callback is None:
            return None

        def guarded() -> None:
            try:
                callback()
            except Exception as error:
                with self._driver.lock:
                    self._engine.fail_next_call(Job(AgreementCheck(call.title)), error)
                raise

        return guarded

    # Comparing calls

    def _new_check(self, call: Call, plan: Plan) -> _Check | None:
        """Return the comparison of a call, unless all ranks have compared one of its class."""
        key = _class_of(call, plan)
        if self._comm.size == 1:
            return None
        if key in self._agreed:
            if call.blocking or not _may_differ_in_counts(call):
                return None
            key = object()  # counts differ from call to call, and a sum of balances would block
        else:
            self._agreed.add(key)
        return self._make_check(key, call.title, plan.signature(call), call)

    def _comparison(self, title: str, signature: str, call: Call | None) -> Job:
        if call is None or not _may_differ_in_counts(call):
            return Job(AgreementCheck(title), signature, everyone=True)
        balance, counts = self._balance.of(call), self._balance.describe(call)
        return Job(AgreementCheck(title), signature, everyone=True, balance=balance, counts=counts)

    def _make_check(self, key: object, title: str, signature: str, call: Call | None = None) -> _Check:
        job = self._comparison(title, signature, call)
        check = self._checks[key] = _Check(job)

        def on_done(job: Job) -> None:
            with self._lock:
                check.done = True
                self._checks.pop(key, None)
                if job.error is not None:
                    # Ranks that disagree may also differ in what they remember: compare everything again.
                    self._agreed.clear()
                    self.fast_path.clear()
                self._advance()

        job.on_done = on_done
        return check

    def agree(self, topic: str, signature: str) -> None:
        """Wait until all ranks have passed the same signature; raise if they do not."""
        self._complete(Job(AgreementCheck(topic), signature, everyone=True))

    def _complete(self, job: Job) -> None:
        self._driver.submit(job, background=False)
        Request(job, self._driver).Wait()

    # Failures

    def _on_mpi_hang(self, error: Exception) -> None:
        """End a native call that will never return: revoke it where MPI can, else abort the job with the reason."""
        step = self._detector.mpi_calls
        with suppress(MPI.Exception, NotImplementedError):
            for comm in (self._comm, *self.derived_comms):
                comm.Revoke()
        time.sleep(REVOKE_SECONDS)
        if self._detector.in_mpi_call is not None and self._detector.mpi_calls == step:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            MPI.COMM_WORLD.Abort(1)

    def check_dead(self, error: MPI.Exception) -> None:
        """Raise RankFailedError instead of MPI's error if a rank is dead, and notify all ranks."""
        if means_death(error, self._comm):
            with self._driver.lock:
                self._engine.fail_all(lost(error, self._comm.rank, self._comm))
                assert self._engine.broken is not None
                raise self._engine.broken from error


def _class_of(call: Call, plan: Plan) -> object:
    """Return what calls have in common that need to be compared only once."""
    if call.unsupported is not None:
        return call.title
    codec = plan.codec.spec if plan.codec else ""
    return call.title, call.nbytes.bit_length(), call.blocks.buffer.dtype.name, call.root, call.op, codec


def _may_differ_in_counts(call: Call) -> bool:
    """Return True for a v-variant, whose counts differ from call to call, so that each call is compared."""
    return call.unsupported is None and (call.counts is None or call.method == "Allgatherv")


def _extent(call: Call) -> int:
    """Return what a call adds to the rolling hash."""
    return method_salt(call.title) + (0 if call.unsupported else call.nbytes + call.root)
