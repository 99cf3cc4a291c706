"""Runs the collectives of a communicator: who has joined, whose turn it is, what has failed.

Ranks talk to each other in letters: that they join a call and how, that one has failed, what they wait for. The data
itself moves in the tasks of the jobs that have a slot (`slots.py`).
"""

from __future__ import annotations

import pickle
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from mpi_gpucomp.engine.agreement import CHANNELS, CallId, CallRegistry, Joined, Past
from mpi_gpucomp.engine.deadlock import DeadlockDetector, post_all
from mpi_gpucomp.engine.failure import Disagreement, Failure, Note, note_for
from mpi_gpucomp.engine.scheduling import Slots
from mpi_gpucomp.errors import PeerError, RankFailedError
from mpi_gpucomp.trace import NO_OBSERVER, NO_TRACE, CallSnapshot, EngineSnapshot, Observer, Trace, WaitSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.engine.scheduling import Job, P2POperation, Work
    from mpi_gpucomp.transport.base import Transport

__all__ = ["Engine"]

FIRST_IN_LINE = 5
"""Tries that the first collective gets in each round; the others get one."""
IDLE_POLLS = 3
"""Polls without progress after which the observer gets its `on_idle`."""
_wrecks: list[Work] = []
"""What was under way when an engine gave up: MPI may still write to its memory, so it is kept as long as MPI is."""


class Engine:
    """The jobs of one communicator."""

    def __init__(self, transport: Transport, slots: int = 2, timeout: float | None = None) -> None:
        """Let so many jobs run at once; after `timeout` seconds in which nothing moves, ask whether it ever will."""
        self.timeout = timeout
        self.broken: Exception | None = None
        """Why nothing more can be done here."""
        self.broken_off: str | None = None
        """What was under way when this rank left, of its own accord: others may wait for it and never look up."""
        self._transport, self._registry, self._tag = transport, CallRegistry(), 0
        rank, size = transport.rank, transport.size
        self._others = frozenset(range(size)) - {rank}
        self._ring = frozenset({(rank - 1) % size, (rank + 1) % size} - {rank})
        """The ranks before and behind this one: by them all ranks are compared, whatever the algorithm."""
        self.to_tell: deque[Job] = deque()
        """Jobs that are over, whose callbacks are to be called by whoever turns the engine."""
        self.p2p_operations: list[P2POperation] = []
        """What concerns this rank and a peer alone: it is moved in every turn, and dropped when it is done."""
        self._alarm: PeerError | None = None
        self._slots = Slots(transport, slots)
        self._jobs: dict[CallId, Job] = {}
        self._failures: dict[CallId, Failure] = {}
        self.watch = DeadlockDetector(transport, self._registry, self._jobs, self._fail)
        self.trace: Trace = NO_TRACE
        self.observer: Observer = NO_OBSERVER
        self._idle_polls = 0
        self._readers: dict[str, Callable[..., None]] = {
            "join": self._hear_join,
            "note": self._hear_note,
            "answer": self._hear_answer,
            "left": self._hear_left,
            "ask": self.watch.hear_ask,
            "tell": self.watch.hear_tell,
            "stuck": self.watch.hear_stuck,
        }

    def submit(self, job: Job) -> None:
        """Add a job to the line, and tell its neighbours."""
        if self.broken:
            raise self.broken
        job.call = call = self._registry.begin(job.name)
        job.task.title, job.trace = job.title, 0 if job.name else self.watch.trace
        self.watch.moved()
        job.task.call_trace = self.trace.begin(job.task.name, job.said)
        job.needs = self._others if job.everyone else self._ring | job.task.neighbours
        self._jobs[call] = job
        failure = self._failures.get(call)
        if failure is not None:
            failure.join(job)
            return
        letter = pickle.dumps(("join", call, Joined(job.said, job.task.tag, job.task.longest, job.trace)))
        for peer in job.needs:
            self._transport.send_control(peer, letter)
        self._slots.add(job)
        if self._alarm is not None:
            alarm, self._alarm = self._alarm, None
            self._fail(job, alarm)
            return
        for peer, joined in self._registry.heard(call).items():
            self._compare(job, peer, joined)
        self._slots.fill()

    def listen(self, kind: str, reader: Callable[..., None]) -> None:
        """Let somebody else read letters of another kind: called with who left it, and what follows its kind."""
        self._readers[kind] = reader

    def free_tag(self) -> int:
        """Return the first of as many tags as a task takes, none of which is in use on this rank.

        They are from the lower half of all tags; the upper one is left to messages between two ranks.
        """
        used = {job.task.tag for job in self._jobs.values()}
        while True:
            self._tag = (self._tag + CHANNELS) % (self._transport.largest_tag // 2 // CHANNELS * CHANNELS)
            if self._tag not in used:
                return self._tag

    @property
    def idle(self) -> bool:
        """Say whether there is nothing to do."""
        return not self._jobs and not self.p2p_operations

    @property
    def under_way(self) -> str | None:
        """Name a collective that is not complete, if there is one."""
        job = next(iter(self._jobs.values()), None)
        return job.title if job else None

    def progress(self, *, waiting: int = 0, naps: int = 0) -> bool:
        """Go on with the running jobs; say if anything moved.

        It is for a caller who waits (a number for each wait) or 0, and has taken so many naps so far.
        """
        if self.broken is not None:
            return False
        try:
            self.observer.on_poll(waiting, naps)
            moved = self._hear()
            if self.p2p_operations:
                moved |= self._run_errands()
            for place, job in enumerate(list(self._slots.running)):
                moved |= self._go_on(job, FIRST_IN_LINE if place == 0 else 1)
            self._slots.preempt()
            self._slots.fill()
            if self._failures:
                moved |= self._settle_failures()
        except RankFailedError as error:
            self.give_up(error)
            return True
        except BaseException as error:  # nobody knows how far it came: Ctrl-C, or a mistake of ours
            self.leave(error)
            if isinstance(error, Exception):
                return True
            raise
        if moved:
            self.watch.moved()
            self._idle_polls = 0
            return True
        self._idle_polls += 1
        if self._idle_polls > IDLE_POLLS:
            self.observer.on_idle()
        if self.timeout is not None:
            self.watch.look(self.timeout)
        return False

    def _run_errands(self) -> bool:
        moved = False
        for errand in self.p2p_operations:
            try:
                moved |= errand.move()
            except RankFailedError:
                raise
            except Exception as error:
                errand.error, errand.done, moved = error, True, True
        self.p2p_operations = [errand for errand in self.p2p_operations if not errand.done]
        return moved

    def _go_on(self, job: Job, tries: int) -> bool:
        """Let a job move; notice its end, and its failure."""
        moved = False
        try:
            for _ in range(tries):
                moves = job.move()
                moved |= moves
                if job.task.done or not moves:
                    break
        except (RankFailedError, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._fail(job, error)
            return True
        if job.task.done:
            self._slots.remove(job)
            self._close(job)
        return moved

    def _close(self, job: Job, error: BaseException | None = None) -> None:
        """Let go of a job that is over."""
        del self._jobs[job.call]
        job.task.call_trace.end(failed=error is not None)
        self._registry.end(job.call, Past(job.said, job.task.sent, job.trace))
        job.error = error
        if job.when_done is None:
            job.finished = True
        else:
            self.to_tell.append(job)

    def alarm(self, job: Job, error: BaseException) -> None:
        """Let all ranks hear that a callback has raised: this one as it waits, all in the next call that it joins.

        So every rank hears of it in the same call, and they stay in step.
        """
        job.error = job.error or error
        self._alarm = PeerError(
            f"callback of {job.title}",
            expected="every rank's to succeed",
            got=f"{type(error).__name__}: {error}",
            remedy="Mend the callback; the collective itself is complete.",
            rank=self._transport.rank,
        )

    # Observation, see `mpi_gpucomp.trace`

    def attach(self, trace: Trace, observer: Observer) -> None:
        """Write to this trace and report to this observer from now on."""
        self.trace, self.observer = trace, observer

    @property
    def rank(self) -> int:
        """Return this process's rank in the communicator."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self._transport.size

    def send_control(self, peer: int, kind: str, *content: int | str) -> None:
        """Send a control message to a peer, for the handler that listens to this kind there."""
        self._transport.send_control(peer, pickle.dumps((kind, *content)))

    def broadcast_control(self, kind: str, *content: int | str) -> None:
        """Send a control message to all other ranks."""
        post_all(self._transport, kind, *content)

    def blocked_since(self) -> float | None:
        """Return since when (`time.monotonic`) the caller has been blocked without progress; None if it is not."""
        return self.watch.waits_since()

    def snapshot(self) -> EngineSnapshot:
        """Return the state of all calls."""
        status = self.watch.status()
        waits = tuple(WaitSnapshot(call.name, call.run, title) for call, title in status.waits.items())
        calls = tuple(_snapshot(job) for job in list(self._jobs.values()))
        failure = None if self.broken is None else f"{type(self.broken).__name__}: {self.broken}"
        return EngineSnapshot(status.runs, waits, calls, failure)

    # Letters

    def _hear(self) -> bool:
        """Read the letters of other ranks; say whether any of them lets a job go on."""
        heard = False
        while (letter := self._transport.recv_control()) is not None:
            peer, content = letter[0], pickle.loads(letter[1])
            self._readers[content[0]](peer, *content[1:])
            heard |= content[0] in ("join", "note", "answer")
        return heard

    def _hear_join(self, peer: int, call: CallId, joined: Joined) -> None:
        job = self._jobs.get(call)
        if job is not None:
            self._compare(job, peer, joined)
        elif not self._registry.begun(call):
            self._registry.hear(call, peer, joined)

    def _compare(self, job: Job, peer: int, joined: Joined) -> None:
        """Take a neighbour's word, unless it is another one than ours."""
        if (joined.said, joined.trace) != (job.said, job.trace):
            self._fail(job, Disagreement())
            return
        job.needs -= {peer}
        job.task.call_trace.joined(peer)
        job.longest = max(job.longest, joined.longest)
        job.task.peer_tags[peer] = joined.tag

    def _hear_note(self, peer: int, call: CallId, note: Note) -> None:
        job = self._jobs.get(call)
        if job is None and self._registry.begun(call):
            past = self._registry.past(call)
            self._transport.send_control(peer, pickle.dumps(("answer", call, note_for(peer, past))))
            return
        if job is not None:
            self._fail(job, None)
        self._failure_of(call).hear(peer, note)

    def _hear_answer(self, peer: int, call: CallId, note: Note) -> None:
        """Take the note of a rank that is through with a call; unlike others it wants none in return."""
        if call in self._failures:
            self._failures[call].hear(peer, note)

    # Failures

    def _failure_of(self, call: CallId) -> Failure:
        """Return what is known of a call that has failed, from now on if not before."""
        if call not in self._failures:
            self._failures[call] = Failure(call, self._transport, 30.0 if self.timeout is None else self.timeout)
        return self._failures[call]

    def _fail(self, job: Job, error: BaseException | None) -> None:
        """Begin to fail a job together with all ranks."""
        self.observer.on_failure(f"{type(error).__name__}: {error}" if error else f"{job.title} has failed elsewhere")
        self._slots.remove(job)
        failure = self._failure_of(job.call)
        if failure.job is None:
            failure.join(job, error)

    def _settle_failures(self) -> bool:
        """Go on with what has failed; end the jobs of what is settled."""
        moved = False
        for call, failure in list(self._failures.items()):
            moved |= failure.move()
            if failure.settled and failure.job is not None:
                del self._failures[call]
                error = failure.verdict(failure.job.title)
                self._close(failure.job, error)
                if isinstance(error, RankFailedError) or (failure.lost_each_other and isinstance(error, Exception)):
                    self.give_up(error)
        return moved

    def give_up(self, error: Exception) -> None:
        """End everything: the ranks cannot reach or understand each other any more."""
        self.observer.on_failure(f"{type(error).__name__}: {error}")
        self.broken = self.broken or error
        self._transport.revoke()
        self._slots.clear()
        self._failures.clear()
        for job in list(self._jobs.values()):
            job.task.halt()
            _wrecks.append(job.task)
            self._close(job, self.broken)
        for errand in self.p2p_operations:
            errand.error, errand.done = self.broken, True
        self.p2p_operations.clear()

    def leave(self, error: BaseException) -> None:
        """Give up for a reason that only this rank knows, and tell it to all."""
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if self.broken is None:
            self.broken_off = self.under_way
            with suppress(RankFailedError):
                post_all(self._transport, "left", why)
            self.give_up(self._left(self._transport.rank, why))

    def _hear_left(self, peer: int, why: str) -> None:
        error = self._left(peer, why)
        self.give_up(error)
        if self.watch.outside is not None:
            self.watch.stuck_outside(error)

    def _left(self, peer: int, why: str) -> PeerError:
        return PeerError(
            "communicator",
            expected="every rank to go on",
            got=f"on rank {peer} {why}",
            remedy="Make a new communicator; this one cannot be used any more.",
            rank=self._transport.rank,
        )


def _snapshot(job: Job) -> CallSnapshot:
    state = "running" if job.started else "waiting for its turn" if not job.needs else "waiting for ranks to join"
    return CallSnapshot(
        job.call.name,
        job.call.run,
        job.title,
        job.said,
        absent=tuple(sorted(job.needs)),
        waited_for=job.waiters > 0,
        state=state,
        coding=job.task.busy,
        in_flight=tuple(job.task.in_flight()),
    )
