"""Runs many collectives at once, in whatever order the ranks start them, in a bounded number of slots.

A collective gets a slot once its neighbours have joined it. One that then waits for a peer gives its slot up after some
tries, with its position kept, and the next in line gets it; so no order in which ranks start collectives can make them
wait for each other in a circle. A collective that moves becomes harder to push out: its patience grows with the time
that its peers take. And whoever has a slot to give looks first for a collective that a peer has already sent
something for. By that the ranks come to work at the same collectives without anybody telling them.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from mpi_gpucomp.engine.failure import Disagreement, Failure, Note, Stuck, deadlock, note_for
from mpi_gpucomp.engine.inquiry import Inquiry, Status, describe, is_circular
from mpi_gpucomp.engine.meeting import CHANNELS, Meeting
from mpi_gpucomp.engine.roll import Call, Joined, Past, Roll
from mpi_gpucomp.errors import PeerError, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.engine.task import Task
    from mpi_gpucomp.transport.base import Transport

    Work = Task | Meeting

__all__ = ["LOW_BITS", "Engine", "Errand", "Job"]

FIRST_PATIENCE = 80
"""Tries without progress after which a collective that has never moved lets another one run."""
STICKINESS = 5
"""How many times as long as its peers took before a collective that has moved is waited for."""
MOST_PATIENCE = 20_000
LOOK_AROUND = 4
"""Tries without progress after which a job looks whether another one could go on in its place."""
FIRST_IN_LINE = 5
"""Tries that the first collective gets in each round; the others get one."""
LOW_BITS = (1 << 61) - 1
OUTSIDE = "MPI's own"
"""The name by which calls that go straight to MPI are counted."""
NEVER_COMES = 10
"""Timeouts after which a rank that waits gives up even if it cannot prove that nothing will move."""
_wrecks: list[Work] = []
"""What was under way when an engine gave up: MPI may still write to its memory, so it is kept as long as MPI is."""


class Errand(Protocol):
    """Something to be done bit by bit that needs no slot and no agreement of all ranks."""

    done: bool
    error: Exception | None

    def move(self) -> bool:
        """Go on without waiting; say whether anything has moved."""
        ...


class Job:
    """A collective that was submitted: its task, how it stands, and what went wrong."""

    def __init__(
        self, task: Work, said: str = "", *, name: str = "", priority: int = 0, uneven: bool = False, trace: int = 0
    ) -> None:
        """Say what it does, for peers to compare; give it a name if ranks may start it in any order.

        In an uneven one no rank knows the lengths of all blocks, so all ranks tell each other.
        """
        self.task, self.said, self.name, self.priority, self.uneven = task, said, name, priority, uneven
        self.trace = trace
        self.call = Call(name, 0)
        self.finished = False
        self.error: BaseException | None = None
        self.preempted = 0
        """How often it has given its slot up."""
        self.waiters = 0
        """How many callers wait for it."""
        self.patience, self.idle = FIRST_PATIENCE, 0
        self.needs: frozenset[int] = frozenset()
        """The peers that must have joined before it may run."""
        self.longest = task.longest
        self.started = False
        self.when_done: Callable[[Job], None] | None = None
        """Called when it is over, before it counts as finished."""

    @property
    def title(self) -> str:
        """Name it for people."""
        return f"{self.task.name} {self.name!r}" if self.name else f"{self.task.name} (call {self.call.run})"

    def start(self) -> None:
        """Get ready to move, once."""
        if not self.started:
            self.task.prepare(self.longest)
            self.started = True

    def move(self) -> bool:
        """Let the task go on."""
        self.start()
        moved = self.task.move()
        if moved:
            self.patience = min(MOST_PATIENCE, max(self.patience, STICKINESS * self.idle))
            self.idle = 0
        elif not self.task.busy:
            self.idle += 1
        return moved

    def tell(self) -> None:
        """Tell whoever wants to hear that it is over."""
        if self.when_done is not None:
            self.when_done(self)


class Engine:
    """The jobs of one communicator."""

    def __init__(self, transport: Transport, slots: int = 2, timeout: float | None = None) -> None:
        """Let so many jobs run at once; after `timeout` seconds in which nothing moves, ask whether it ever will."""
        self.slots, self.timeout = slots, timeout
        self.broken: Exception | None = None
        """Why nothing more can be done here."""
        self._transport, self._roll, self._tag = transport, Roll(), 0
        rank, size = transport.rank, transport.size
        self._others = frozenset(range(size)) - {rank}
        self._ring = frozenset({(rank - 1) % size, (rank + 1) % size} - {rank})
        """The ranks before and behind this one: by them all ranks are compared, whatever the algorithm."""
        self.to_tell: deque[Job] = deque()
        """Jobs that are over, whose callbacks are to be called by whoever turns the engine."""
        self.errands: list[Errand] = []
        """What concerns this rank and a peer alone: it is moved in every turn, and dropped when it is done."""
        self._alarm: PeerError | None = None
        self._running: list[Job] = []
        self._waiting: deque[Job] = deque()
        self._jobs: dict[Call, Job] = {}
        self._failures: dict[Call, Failure] = {}
        self.outside: str | None = None
        """What the caller is doing in MPI, on its own."""
        self.steps = 0
        """How many such calls there have been."""
        self.trace = 0
        """A number made of all of them, for ranks to compare."""
        self.stuck_outside: Callable[[Exception], None] = _ignore
        """What to do when the caller will never come back from there."""
        self._seen_outside = 0, 0.0
        self._moved_at, self._asked_at = time.monotonic(), 0.0
        self._inquiry: Inquiry | None = None
        self._inquiries = 0

    def submit(self, job: Job) -> None:
        """Add a job to the line, and tell its neighbours."""
        if self.broken:
            raise self.broken
        job.call = call = self._roll.begin(job.name)
        job.task.title = job.title
        self._moved_at = time.monotonic()
        job.needs = self._others if job.uneven else self._ring | job.task.neighbours
        self._jobs[call] = job
        failure = self._failures.get(call)
        if failure is not None:
            failure.join(job)
            return
        letter = pickle.dumps(("join", call, Joined(job.said, job.task.tag, job.task.longest, job.trace)))
        for peer in job.needs:
            self._transport.post(peer, letter)
        self._waiting.append(job)
        if self._alarm is not None:
            alarm, self._alarm = self._alarm, None
            self._fail(job, alarm)
            return
        for peer, joined in self._roll.heard(call).items():
            self._compare(job, peer, joined)
        self._fill()

    def free_tag(self) -> int:
        """Return the first of as many tags as a task takes, none of which is in use on this rank."""
        used = {job.task.tag for job in self._jobs.values()}
        while True:
            self._tag = (self._tag + CHANNELS) % ((self._transport.largest_tag + 1) // CHANNELS * CHANNELS)
            if self._tag not in used:
                return self._tag

    def note(self, number: int) -> None:
        """Count a call that goes straight to MPI, and add what it is to the trace of all such calls."""
        self.trace = (self.trace * 31 + number) & LOW_BITS
        self.steps += 1

    @property
    def idle(self) -> bool:
        """Say whether there is nothing to do."""
        return not self._jobs and not self.errands

    @property
    def under_way(self) -> str | None:
        """Name a collective that is not complete, if there is one."""
        job = next(iter(self._jobs.values()), None)
        return job.title if job else None

    def progress(self) -> bool:
        """Go on with the running jobs; say whether anything moved."""
        if self.broken is not None:
            return False
        try:
            moved = self._hear()
            moved |= self._run_errands()
            for place, job in enumerate(list(self._running)):
                moved |= self._go_on(job, FIRST_IN_LINE if place == 0 else 1)
            self._preempt()
            self._fill()
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
            self._moved_at = time.monotonic()
        elif self.timeout is not None:
            self._suspect(self.timeout)
        return moved

    def _run_errands(self) -> bool:
        moved = False
        for errand in self.errands:
            try:
                moved |= errand.move()
            except RankFailedError:
                raise
            except Exception as error:
                errand.error, errand.done, moved = error, True, True
        self.errands = [errand for errand in self.errands if not errand.done]
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
            self._running.remove(job)
            self._close(job)
        return moved

    def _close(self, job: Job, error: BaseException | None = None) -> None:
        """Let go of a job that is over."""
        del self._jobs[job.call]
        self._roll.end(job.call, Past(job.said, job.task.sent, job.trace))
        job.error = error
        if job.when_done is None:
            job.finished = True
        else:
            self.to_tell.append(job)

    def alarm(self, job: Job, error: Exception) -> None:
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

    # Slots

    def _preempt(self) -> None:
        """Take slots from those that wait, for one that a peer is at already, or when their patience is at its end."""
        for job in list(self._running):
            if not self._waiting:
                return
            other = None
            if job.idle > job.patience:
                other = self._next()
            elif job.idle and job.idle % LOOK_AROUND == 0:
                other = self._expected()
            if other is not None:
                self._running.remove(job)
                job.task.suspend()
                job.idle, job.preempted = 0, job.preempted + 1
                self._run(other)
                self._waiting.append(job)

    def _fill(self) -> None:
        """Give free slots to jobs that can go on."""
        while len(self._running) < self.slots and (job := self._next()) is not None:
            self._run(job)

    def _run(self, job: Job) -> None:
        self._waiting.remove(job)
        self._running.append(job)

    def _next(self) -> Job | None:
        """Return who gets a slot: one that a peer is at already, else the first of the highest priority.

        Those that had a slot and could not use it come behind those that had none, or they would pass it to and fro.
        """
        expected = self._expected()
        if expected is not None:
            return expected
        ready = (job for job in self._waiting if not job.needs)
        return max(ready, key=lambda job: (-job.preempted, job.priority), default=None)

    def _expected(self) -> Job | None:
        """Return a waiting job that a peer has already sent something for."""
        tag = self._transport.unasked() if self._waiting else None
        if tag is None:
            return None
        base = tag - tag % CHANNELS
        return next((job for job in self._waiting if job.task.tag == base and not job.needs), None)

    # Letters

    def _hear(self) -> bool:
        """Read the letters of other ranks; say whether any of them lets a job go on."""
        heard = False
        while (letter := self._transport.poll()) is not None:
            peer, content = letter[0], pickle.loads(letter[1])
            getattr(self, f"_hear_{content[0]}")(peer, *content[1:])
            heard |= content[0] in ("join", "note", "answer")
        return heard

    def _hear_join(self, peer: int, call: Call, joined: Joined) -> None:
        job = self._jobs.get(call)
        if job is not None:
            self._compare(job, peer, joined)
        elif not self._roll.begun(call):
            self._roll.hear(call, peer, joined)

    def _compare(self, job: Job, peer: int, joined: Joined) -> None:
        """Take a neighbour's word, unless it is another one than ours."""
        if (joined.said, joined.trace) != (job.said, job.trace):
            if job.call not in self._failures:
                self._fail(job, Disagreement())
            return
        job.needs -= {peer}
        job.longest = max(job.longest, joined.longest)
        job.task.peer_tags[peer] = joined.tag

    def _hear_note(self, peer: int, call: Call, note: Note) -> None:
        job = self._jobs.get(call)
        if job is None and self._roll.begun(call):
            past = self._roll.past(call)
            self._transport.post(peer, pickle.dumps(("answer", call, note_for(peer, past))))
            return
        if call not in self._failures:
            self._failures[call] = Failure(call, self._transport, self._settle_time)
            if job is not None:
                self._fail(job, None)
        self._failures[call].hear(peer, note)

    def _hear_answer(self, peer: int, call: Call, note: Note) -> None:
        """Take the note of a rank that is through with a call; unlike others it wants none in return."""
        if call in self._failures:
            self._failures[call].hear(peer, note)

    # Failures

    @property
    def _settle_time(self) -> float:
        return 30.0 if self.timeout is None else self.timeout

    def _fail(self, job: Job, error: BaseException | None) -> None:
        """Begin to fail a job together with all ranks."""
        for line in (self._running, self._waiting):
            if job in line:
                line.remove(job)
        failure = self._failures.get(job.call)
        if failure is None:
            failure = self._failures[job.call] = Failure(job.call, self._transport, self._settle_time)
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
        self.broken = self.broken or error
        self._transport.revoke()
        self._running.clear()
        self._waiting.clear()
        self._failures.clear()
        for job in list(self._jobs.values()):
            job.task.halt()
            _wrecks.append(job.task)
            self._close(job, self.broken)
        for errand in self.errands:
            errand.error, errand.done = self.broken, True
        self.errands.clear()

    def leave(self, error: BaseException) -> None:
        """Give up for a reason that only this rank knows, and tell it to all."""
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if self.broken is None:
            with suppress(RankFailedError):
                self._post_all("left", why)
            self.give_up(self._left(self._transport.rank, why))

    def _hear_left(self, peer: int, why: str) -> None:
        error = self._left(peer, why)
        self.give_up(error)
        if self.outside is not None:
            self.stuck_outside(error)

    def _left(self, peer: int, why: str) -> PeerError:
        return PeerError(
            "communicator",
            expected="every rank to go on",
            got=f"on rank {peer} {why}",
            remedy="Make a new communicator; this one cannot be used any more.",
            rank=self._transport.rank,
        )

    # Deadlock

    def _status(self) -> Status:
        waits = {job.call: job.title for job in self._jobs.values() if job.waiters}
        if self.outside is not None:
            waits[Call(OUTSIDE, self.steps)] = f"{self.outside} of MPI's own (number {self.steps})"
        return Status(waits, self._roll.runs | {OUTSIDE: self.steps})

    def _waits_since(self) -> float | None:
        """Return since when the caller has been waiting with nothing moving, if it has."""
        if self.outside is None:
            return self._moved_at if any(job.waiters for job in self._jobs.values()) else None
        if self._seen_outside[0] != self.steps:
            self._seen_outside = self.steps, time.monotonic()
        return self._seen_outside[1]

    def _suspect(self, timeout: float) -> None:
        """Ask all ranks what they wait for, when somebody here has waited for long; end it if nothing can move."""
        now, since = time.monotonic(), self._waits_since()
        if since is None:
            return
        if self._inquiry is None and now - max(since, self._asked_at) > timeout:
            self._inquiries, self._asked_at = self._inquiries + 1, now
            size, rank = self._transport.size, self._transport.rank
            self._inquiry = Inquiry(self._inquiries, size, rank, self._status())
            self._post_all("ask", self._inquiries)
        elif self._inquiry is not None and self._inquiry.complete:
            self._judge(self._inquiry, now - since > NEVER_COMES * timeout)
            self._inquiry = None

    def _judge(self, inquiry: Inquiry, enough: bool) -> None:
        size, rank = self._transport.size, self._transport.rank
        if enough or is_circular(inquiry.told, size, rank):
            calls = {other: list(status.waits) for other, status in inquiry.told.items()}
            text = describe(inquiry.told, size)
            self._post_all("stuck", text, calls)
            self._hear_stuck(rank, text, calls)

    def _hear_ask(self, peer: int, number: int) -> None:
        self._transport.post(peer, pickle.dumps(("tell", number, self._status())))

    def _hear_tell(self, peer: int, number: int, status: Status) -> None:
        if self._inquiry is not None and self._inquiry.number == number:
            self._inquiry.told[peer] = status

    def _hear_stuck(self, peer: int, text: str, calls: dict[int, list[Call]]) -> None:
        """End what this rank was waiting for when it was asked."""
        for call in calls.get(self._transport.rank, ()):
            if call == Call(OUTSIDE, self.steps) and self.outside is not None:
                self.stuck_outside(deadlock(text, self._transport.rank))
            job = self._jobs.get(call)
            if job is not None and call not in self._failures:
                self._fail(job, Stuck(text))

    def _post_all(self, *content: Any) -> None:
        letter = pickle.dumps(content)
        for peer in range(self._transport.size):
            if peer != self._transport.rank:
                self._transport.post(peer, letter)


def _ignore(error: Exception) -> None:
    """Do nothing about it."""
