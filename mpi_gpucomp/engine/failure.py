"""Failing together: when a call goes wrong on one rank, it ends on all, with nothing left on the way.

The rank that has failed tells all others, with what it said of the call and how many messages it has sent them. Each
that hears of it stops too and tells all others in turn. Then everybody receives, and throws away, what is still on its
way, so that no send waits for ever and no later call meets a message of this one; and the error that it raises can
say who said what.
"""

from __future__ import annotations

import pickle
import time
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.engine.agreement import Past
from mpi_gpucomp.errors import AgreementError, DeadlockError, GpucompError, PeerError, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpi_gpucomp.engine.agreement import CallId
    from mpi_gpucomp.engine.scheduling import Job
    from mpi_gpucomp.transport.base import Transport

__all__ = ["Disagreement", "Failure", "Note", "Stuck", "deadlock", "note_for", "who_said_what"]

GRACE = 1.0
"""Seconds in which a rank that has not joined a failed call yet may come, and be heard by the others."""


class Disagreement(Exception):
    """A neighbour has said something else of the call."""


class Stuck(Exception):
    """The ranks wait for each other; the text says who for what."""


class Note(NamedTuple):
    """What one rank tells another of a failed call: what it said, what went wrong there (or that nothing did)."""

    said: str | None
    kind: str | None
    text: str
    sent: dict[int, int]
    """Messages that it has sent to the one who reads this, by channel."""
    trace: int | None
    """What it did before, see `Joined`; None if it was not there."""


def note_for(peer: int, past: Past | None, error: BaseException | None = None) -> Note:
    """Write the note for one peer, of what this rank did in the call, if it was there."""
    kind, text = (type(error).__name__, str(error)) if error else (None, "")
    if past is None:
        return Note(None, kind, text, {}, None)
    here = {channel: count for (to, channel), count in past.sent.items() if to == peer}
    return Note(past.said, kind, text, here, past.trace)


class Failure:
    """A call that has failed on some rank: what is known of it, until nothing of it is left."""

    def __init__(self, call: CallId, transport: Transport, timeout: float) -> None:
        """Start with what is known here; peers have `timeout` seconds to answer."""
        self.call, self._transport = call, transport
        self.job: Job | None = None
        self.settled = False
        """Whether all ranks have answered and nothing is on its way any more."""
        self._left_over = False
        self._error: BaseException | None = None
        self._notes: dict[int, Note] = {}
        now = time.monotonic()
        self._answer_by, self._give_up = now + GRACE, now + GRACE + timeout

    def join(self, job: Job, error: BaseException | None = None) -> None:
        """Stop a job of this rank, for an error of its own or because another rank has one, and tell all."""
        self.job, self._error = job, error
        job.task.abandon()
        self._tell(Past(job.said, job.task.sent, job.trace), error)

    def hear(self, peer: int, note: Note) -> None:
        """Take a peer's note; one that has told its error may answer again, when it is through with the call."""
        if note.kind or not (peer in self._notes and self._notes[peer].kind):
            self._notes[peer] = note

    def move(self) -> bool:
        """Go on; say whether it is settled now, and was not before."""
        if self.settled:
            return False
        now = time.monotonic()
        if self._transport.rank not in self._notes and now > self._answer_by:
            self._tell(None)
        if len(self._notes) < self._transport.size and now < self._give_up:
            return False
        if self.job is not None and not self.job.task.wind_down(self._owed()):
            if now < self._give_up:
                return False
            self._left_over = True
        self.settled = True
        return True

    def _tell(self, past: Past | None, error: BaseException | None = None) -> None:
        for peer in range(self._transport.size):
            note = note_for(peer, past, error)
            if peer == self._transport.rank:
                self._notes[peer] = note
            else:
                self._transport.send_control(peer, pickle.dumps(("note", self.call, note)))

    def _owed(self) -> dict[tuple[int, int], int]:
        """Return how many messages have been sent to this rank, by peer and channel."""
        return {(peer, channel): n for peer, note in self._notes.items() for channel, n in note.sent.items()}

    @property
    def missing(self) -> list[int]:
        """Return the ranks that have not answered."""
        return [rank for rank in range(self._transport.size) if rank not in self._notes]

    def verdict(self, title: str) -> BaseException:
        """Make the error that this rank raises."""
        wrong = {note.kind: note.text for note in self._notes.values() if note.kind}
        if self.missing or self._left_over:
            return self._no_end(title)
        if Stuck.__name__ in wrong:
            return deadlock(wrong[Stuck.__name__], self._transport.rank)
        if Disagreement.__name__ in wrong:
            return self._disagreement(title)
        if self._error is not None:
            return self._error
        return self._elsewhere(title)

    def _disagreement(self, title: str) -> GpucompError:
        said = {rank: note.said or "has not called it yet" for rank, note in sorted(self._notes.items())}
        if self.lost_each_other:
            said = {rank: f"{text}, after other small calls" for rank, text in said.items()}
        same = "Pass the same count, type, root, operation, codec, chunk and algorithm on every rank."
        return AgreementError(
            title,
            expected="the same calls on every rank" if self.lost_each_other else "the same call on every rank",
            got=who_said_what(said),
            remedy=f"{same} This communicator cannot be used any more." if self.lost_each_other else same,
            rank=self._transport.rank,
        )

    @property
    def lost_each_other(self) -> bool:
        """Say whether the ranks have called MPI differently before: what is on its way there is for nobody."""
        return len({note.trace for note in self._notes.values()} - {None}) > 1

    def _elsewhere(self, title: str) -> GpucompError:
        wrong = {rank: note for rank, note in sorted(self._notes.items()) if note.kind}
        return PeerError(
            title,
            expected="every rank to carry it out",
            got="; ".join(f"on rank {rank} {note.kind}: {note.text.removesuffix('.')}" for rank, note in wrong.items()),
            remedy="Mend what went wrong there. The output here is not complete; the communicator can be used on.",
            rank=self._transport.rank,
        )

    def _no_end(self, title: str) -> GpucompError:
        silent = f"no answer from {', '.join(f'rank {rank}' for rank in self.missing)}"
        error = RankFailedError(
            title,
            expected="every rank to answer after it failed, and what they sent to arrive",
            got=silent if self.missing else "messages that are still on their way",
            remedy="Make a new communicator without them; this one cannot be used any more.",
            rank=self._transport.rank,
        )
        error.__cause__ = self._error
        return error


def deadlock(text: str, rank: int) -> DeadlockError:
    """Make the error of ranks that wait for each other."""
    return DeadlockError(
        "collectives",
        expected="every rank to join what the others wait for",
        got=text,
        remedy="Start collectives before waiting for others, or wait for them in the same order on every rank.",
        rank=rank,
    )


def who_said_what(sayings: Mapping[int, str]) -> str:
    """Write what each rank said, those who said the same together."""
    ranks: dict[str, list[str]] = {}
    for rank, said in sayings.items():
        ranks.setdefault(said, []).append(str(rank))
    return "; ".join(f"rank{'s' * (len(who) > 1)} {', '.join(who)}: {said}" for said, who in ranks.items())
