"""The engine of a communicator: which ranks have joined which call, which calls run, and what has failed.

Ranks exchange control messages (`control_messages`): that they join a call and with what signature, that one has
failed, what they are blocked in. The data moves in the tasks of the jobs that have a slot (`scheduling`).
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from mpi_gpucomp.core.library import CODING, CONTROL, FAULT, STALLED, TASK, core
from mpi_gpucomp.engine.agreement import CHANNELS, AgreementCheck, CallId, CallRegistry, CallResult
from mpi_gpucomp.engine.control_messages import (
    Abort,
    ControlMessage,
    DeadlockFound,
    DeadlockQuery,
    DeadlockReply,
    FailureReport,
    Join,
    ObserverMessage,
    clip,
    decode,
    encode,
)
from mpi_gpucomp.engine.deadlock import DeadlockDetector, broadcast
from mpi_gpucomp.engine.failure import Failure, SignatureMismatch, report_for
from mpi_gpucomp.engine.scheduling import Slots
from mpi_gpucomp.errors import AgreementError, ControlMessageError, PeerError, RankFailedError
from mpi_gpucomp.trace import NO_OBSERVER, NO_TRACE, CallSnapshot, EngineSnapshot, Observer, Trace, WaitSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.core.wire import CoreEvent, Wire
    from mpi_gpucomp.engine.scheduling import Completion, Job, P2POperation, Work
    from mpi_gpucomp.engine.task import CollectiveTask

__all__ = ["Engine"]

IDLE_POLLS = 3
"""Polls without progress after which the observer gets its `on_idle`."""
_leaked: list[Work | P2POperation] = []
"""What was in flight when an engine failed: the wire may still write to its memory, so it is kept for good."""


class Engine:
    """The jobs of one communicator."""

    def __init__(self, wire: Wire, slots: int = 2, timeout: float | None = None) -> None:
        """Run `slots` jobs at once; probe for a deadlock after `timeout` seconds without progress."""
        self.timeout = timeout
        self.broken: Exception | None = None
        """Why the communicator cannot be used any more."""
        self.aborted_call: str | None = None
        """The collective in progress when this rank aborted; peers blocked in it may never notice."""
        self.wire, self._registry, self._tag = wire, CallRegistry(), 0
        rank, size = wire.rank, wire.size
        self._others = frozenset(range(size)) - {rank}
        self._ring = frozenset({(rank - 1) % size, (rank + 1) % size} - {rank})
        """Neighbours in a ring: they connect all ranks in the comparison of signatures, for any algorithm."""
        self.callbacks: deque[Completion] = deque()
        """What has completed and whose callbacks are still to be called, outside of the lock."""
        self.p2p_operations: list[P2POperation] = []
        """Point-to-point operations, progressed in every poll and removed when done."""
        self._pending_error: PeerError | None = None
        self._slots = Slots(wire, slots)
        self._jobs: dict[CallId, Job] = {}
        self.has_ended = False
        """Whether a job has ended since this was last reset: threads that wait for it may sleep in the core."""
        self._by_handle: dict[int, Job] = {}
        """Jobs by the handles of their tasks, which the events of the core name."""
        self._failures: dict[CallId, Failure] = {}
        self.deadlock = DeadlockDetector(wire, self._registry, self._jobs, self._fail)
        self.trace: Trace = NO_TRACE
        self.observer: Observer = NO_OBSERVER
        self._idle_polls = 0
        self._observer_handlers: dict[str, Callable[[int, int, str], None]] = {}
        self._handlers: dict[type[Any], Callable[[int, Any], None]] = {
            Join: self._on_join,
            FailureReport: self._on_report,
            Abort: self._on_abort,
            DeadlockQuery: self.deadlock.on_query,
            DeadlockReply: self.deadlock.on_reply,
            DeadlockFound: self.deadlock.on_found,
            ObserverMessage: self._on_observer_message,
        }

    def submit(self, job: Job) -> None:
        """Queue a job, and join its call."""
        if self.broken:
            raise self.broken
        job.call = call = self._registry.begin(job.name)
        job.task.title, job.trace = job.title, 0 if job.name else self.deadlock.mpi_trace
        self.deadlock.on_progress()
        job.task.call_trace = self.trace.begin(job.task.name, job.signature)
        job.needs = self._others if job.everyone else self._ring | job.task.neighbours
        self._jobs[call] = self._by_handle[job.task.handle] = job
        failure = self._failures.get(call)
        if failure is not None:
            failure.join(job)
            return
        self._slots.add(job)  # first: sockets send the credits for its receives together with the join
        join = encode(Join(*call, job.signature, job.task.tag, job.task.longest, job.trace, job.balance))
        for peer in job.needs:
            self.wire.send_control(peer, join)
        if self._pending_error is not None:
            error, self._pending_error = self._pending_error, None
            self._fail(job, error)
            return
        for peer, joined in self._registry.joins(call).items():
            self._compare(job, peer, joined)
        self._slots.fill()

    def free_tag(self) -> int:
        """Return the first of `CHANNELS` tags that are not in use on this rank.

        They are from the lower half of all tags; the upper half is for point-to-point messages.
        """
        used = {job.task.tag for job in self._jobs.values()}
        while True:
            self._tag = (self._tag + CHANNELS) % (self.wire.largest_tag // 2 // CHANNELS * CHANNELS)
            if self._tag not in used:
                return self._tag

    @property
    def idle(self) -> bool:
        """Return True if there is nothing to do."""
        return not self._jobs and not self.p2p_operations

    @property
    def active_call(self) -> str | None:
        """Return the title of a collective that has not completed, if there is one."""
        job = next(iter(self._jobs.values()), None)
        return job.title if job else None

    @property
    def needs_polling(self) -> bool:
        """Return True if there is work that the core does not know of, and whose end it cannot report."""
        return bool(self.p2p_operations or self._failures or any(job.task.needs_python for job in self._jobs.values()))

    def progress(self, *, waiting: int = 0, naps: int = 0, moved: bool | None = None) -> bool:
        """Run the core for a moment and handle its events; return True if anything progressed.

        `waiting` numbers the wait of a blocked caller, 0 if none is blocked; `naps` counts how often it has slept.
        `moved` is what the core has returned, if it has just run: then only its events are handled.
        """
        if self.broken is not None:
            return False
        try:
            self.observer.on_poll(waiting, naps + self.wire.sleeps)
            if moved is None:
                moved = self.wire.run(foreground=False)
            for event in self.wire.events():
                moved |= self._handle(event)
            if self.p2p_operations:
                moved |= self._progress_p2p()
            for job in [job for job in self._jobs.values() if job.task.needs_python and job.started]:
                moved |= self._progress_job(job, job.task.progress)
            self._slots.fill()
            if self._failures:
                moved |= self._progress_failures()
        except RankFailedError as error:
            self.fail_all(error)
            return True
        except BaseException as error:  # Ctrl-C, a malformed message or a bug: the state is unknown
            self.abort(error)
            if isinstance(error, Exception):
                return True
            raise
        if moved:
            self.deadlock.on_progress()
            self._idle_polls = 0
            return True
        self._idle_polls += 1
        if self._idle_polls > IDLE_POLLS:
            self.observer.on_idle()
        if self.timeout is not None:
            self.deadlock.check(self.timeout)
        return False

    def _handle(self, event: CoreEvent) -> bool:
        """Handle an event of the core; return True if it may let a job progress."""
        if event.kind == CONTROL:
            return self._recv_control()
        if event.kind == FAULT:
            raise self.wire.error()
        job = self._by_handle.get(event.task)
        if job is None:
            return False
        task = cast("CollectiveTask", job.task)  # others are unknown to the core
        if event.kind == TASK:
            return self._progress_job(job, task.ended)
        if event.kind == CODING:
            task.code(event.op)
            return True
        assert event.kind == STALLED, event
        self._slots.on_stall(job, too_long=bool(event.code))
        return False

    def _progress_p2p(self) -> bool:
        moved = False
        for operation in self.p2p_operations:
            try:
                moved |= operation.progress()
            except RankFailedError:
                raise
            except Exception as error:
                operation.error, operation.done, moved = error, True, True
        self.p2p_operations = [operation for operation in self.p2p_operations if not operation.done]
        return moved

    def _progress_job(self, job: Job, progress: Callable[[], object]) -> bool:
        """Progress what a job does in Python; end the job if it has completed or failed."""
        try:
            moved = bool(progress())
        except (RankFailedError, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._fail(job, error)
            return True
        if job.task.done and job.call not in self._failures:
            self._slots.remove(job)
            self._close(job)
            return True
        return moved

    def _close(self, job: Job, error: BaseException | None = None) -> None:
        """Complete a job."""
        del self._jobs[job.call]
        self._by_handle.pop(job.task.handle, None)
        self.has_ended = True
        job.task.call_trace.end(failed=error is not None)
        if error is None:
            job.task.free()
        self._registry.end(job.call, CallResult(job.signature, job.task.sent, job.trace))
        job.error = error
        if job.on_done is None:
            job.finished = True
        else:
            self.callbacks.append(job)

    def end_unjoined(self) -> None:
        """Fail the calls that some rank has not joined: none will join any more."""
        for job in list(self._jobs.values()):
            if not job.needs or job.call in self._failures:
                continue
            if isinstance(job.task, AgreementCheck) and job.on_done is None and not job.waiters:
                self._slots.remove(job)  # a report of an error that this rank has raised, to ranks without that call
                self._close(job)
            else:
                self._fail(job, self._unjoined(job))

    def _unjoined(self, job: Job) -> AgreementError:
        ranks = ", ".join(f"rank {rank}" for rank in sorted(job.needs))
        return AgreementError(
            job.title,
            expected="every rank to start it before Free",
            got=f"Free, which all ranks have called, {ranks} without starting it",
            remedy="Start it on every rank, or on none.",
            rank=self.wire.rank,
        )

    def fail_next_call(self, job: Completion, error: BaseException) -> None:
        """Report an error of a callback: to the job's waiter, and to all ranks in the next call of this rank.

        So every rank gets it in the same call, and they stay in step.
        """
        job.error = job.error or error
        self._pending_error = PeerError(
            f"callback of {job.title}",
            expected="success on every rank",
            got=f"{type(error).__name__}: {error}",
            remedy="Fix the callback; the collective itself has completed.",
            rank=self.wire.rank,
        )

    # Observation, see `mpi_gpucomp.trace`

    def attach(self, trace: Trace, observer: Observer) -> None:
        """Write to this trace and report to this observer from now on."""
        self.trace, self.observer = trace, observer
        trace.share_numbers(core().gc_next_record_number)

    @property
    def rank(self) -> int:
        """Return this process's rank in the communicator."""
        return self.wire.rank

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.wire.size

    def listen(self, kind: str, handler: Callable[[int, int, str], None]) -> None:
        """Call `handler(peer, number, text)` for every observer message of a kind."""
        self._observer_handlers[kind] = handler

    def send_control(self, peer: int, kind: str, number: int = 0, text: str = "") -> None:
        """Send an observer message to a peer."""
        self.wire.send_control(peer, encode(ObserverMessage(kind, number, text)))

    def broadcast_control(self, kind: str, number: int = 0, text: str = "") -> None:
        """Send an observer message to all other ranks."""
        broadcast(self.wire, ObserverMessage(kind, number, text))

    def blocked_since(self) -> float | None:
        """Return since when (`time.monotonic`) the caller has been blocked without progress; None if it is not."""
        return self.deadlock.blocked_since()

    def snapshot(self) -> EngineSnapshot:
        """Return the state of all calls."""
        status = self.deadlock.status()
        waits = tuple(WaitSnapshot(call.name, call.run, title) for call, title in status.waits.items())
        calls = tuple(_snapshot(job) for job in list(self._jobs.values()))
        failure = None if self.broken is None else f"{type(self.broken).__name__}: {self.broken}"
        return EngineSnapshot(status.runs, waits, calls, failure)

    # Control messages

    def handle(self, message: type[ControlMessage], handler: Callable[[int, Any], None]) -> None:
        """Call `handler(peer, message)` for every control message of a type."""
        self._handlers[message] = handler

    def _recv_control(self) -> bool:
        """Handle control messages; return True if one may let a job progress."""
        moved = False
        while (received := self.wire.recv_control()) is not None:
            peer, data = received
            message = decode(data, peer, self.wire.rank)
            handler = self._handlers.get(type(message))
            if handler is None:
                raise self._unexpected(peer, message, f"no {type(message).__name__} on this communicator", "one")
            handler(peer, message)
            moved |= isinstance(message, (Join, FailureReport))
        return moved

    def _unexpected(self, peer: int, message: ControlMessage, expected: str, got: str) -> ControlMessageError:
        return ControlMessageError(
            f"control message {type(message).__name__} from rank {peer}",
            expected=expected,
            got=got,
            remedy="Use the same options of the communicator on every rank.",
            rank=self.wire.rank,
        )

    def _on_observer_message(self, peer: int, message: ObserverMessage) -> None:
        handler = self._observer_handlers.get(message.kind)
        if handler is None:
            known = ", ".join(sorted(self._observer_handlers)) or "none"
            raise self._unexpected(peer, message, f"one of these kinds: {known}", repr(message.kind[:100]))
        handler(peer, message.number, message.text)

    def _on_join(self, peer: int, join: Join) -> None:
        call = CallId(join.name, join.run)
        job = self._jobs.get(call)
        if job is not None:
            self._compare(job, peer, join)
        elif not self._registry.has_begun(call):
            self._registry.add_join(call, peer, join)

    def _compare(self, job: Job, peer: int, join: Join) -> None:
        """Accept the join of a neighbour, unless its signature is different."""
        if (join.signature, join.trace) != (job.signature, job.trace):
            self._fail(job, SignatureMismatch())
            return
        job.needs -= {peer}
        job.task.call_trace.joined(peer)
        job.longest = max(job.longest, join.longest)
        job.balance += join.balance
        if not job.needs and job.balance % (1 << 64):
            self._fail(job, SignatureMismatch())
            return
        job.task.set_peer_tag(peer, join.tag)

    def _on_report(self, peer: int, report: FailureReport) -> None:
        call = CallId(report.name, report.run)
        if report.answer:
            if call in self._failures:
                self._failures[call].on_report(peer, report)
            return
        job = self._jobs.get(call)
        if job is None and self._registry.has_begun(call):
            answer = report_for(peer, call, self._registry.result(call), answer=True)
            self.wire.send_control(peer, encode(answer))
            return
        if job is not None:
            self._fail(job, None)
        self._failure_of(call).on_report(peer, report)

    # Failures

    def _failure_of(self, call: CallId) -> Failure:
        """Return the failure of a call, created on first use."""
        if call not in self._failures:
            self._failures[call] = Failure(call, self.wire, 30.0 if self.timeout is None else self.timeout)
        return self._failures[call]

    def _fail(self, job: Job, error: BaseException | None) -> None:
        """Start to fail a job together with all ranks."""
        self.observer.on_failure(f"{type(error).__name__}: {error}" if error else f"{job.title} failed on a peer")
        self._slots.remove(job)
        failure = self._failure_of(job.call)
        if failure.job is None:
            failure.join(job, error)

    def _progress_failures(self) -> bool:
        """Progress the failures; end the jobs of those that are settled."""
        moved = False
        for call, failure in list(self._failures.items()):
            moved |= failure.progress()
            if failure.settled and failure.job is not None:
                del self._failures[call]
                error = failure.error(failure.job.title)
                if failure.job.task.handle:  # it could not be drained
                    _leaked.append(failure.job.task)
                self._close(failure.job, error)
                if isinstance(error, RankFailedError) or (failure.diverged and isinstance(error, Exception)):
                    self.fail_all(error)
        return moved

    def fail_all(self, error: Exception) -> None:
        """Fail the communicator and everything in progress."""
        self.observer.on_failure(f"{type(error).__name__}: {error}")
        self.broken = self.broken or error
        self.wire.revoke()
        self._slots.clear()
        self._failures.clear()
        for job in list(self._jobs.values()):
            job.task.halt()
            job.task.quiesce()
            _leaked.append(job.task)
            self._close(job, self.broken)
        _leaked.extend(self.p2p_operations)
        for operation in self.p2p_operations:
            operation.error, operation.done = self.broken, True
        self.p2p_operations.clear()

    def abort(self, error: BaseException) -> None:
        """Fail the communicator for a reason that only this rank knows, on all ranks."""
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if self.broken is None:
            self.aborted_call = self.active_call
            with suppress(RankFailedError):
                broadcast(self.wire, Abort(clip(reason)))
            self.fail_all(self._aborted(self.wire.rank, reason))

    def _on_abort(self, peer: int, message: Abort) -> None:
        error = self._aborted(peer, message.reason)
        self.fail_all(error)
        if self.deadlock.in_mpi_call is not None:
            self.deadlock.on_mpi_hang(error)

    def _aborted(self, peer: int, reason: str) -> PeerError:
        return PeerError(
            "communicator",
            expected="no rank to abort",
            got=f"on rank {peer} {reason}",
            remedy="Make a new communicator; this one cannot be used any more.",
            rank=self.wire.rank,
        )


def _snapshot(job: Job) -> CallSnapshot:
    state = "running" if job.started else "waiting for a slot" if not job.needs else "waiting for ranks to join"
    return CallSnapshot(
        job.call.name,
        job.call.run,
        job.title,
        job.signature,
        absent=tuple(sorted(job.needs)),
        waited_for=job.waiters > 0,
        state=state,
        coding=job.task.busy,
        in_flight=tuple(job.task.in_flight()),
    )
