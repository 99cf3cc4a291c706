"""Failing together: a call that fails on one rank ends on all, with nothing left in flight.

The rank that has failed reports to all others its signature, its error and how many messages it has sent them. Each
rank that receives a report stops too and reports to all others. Then every rank receives and drops what is still in
flight, so that no send blocks forever and no later call receives a message of this one. The error of each rank
names the signature of each rank.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mpi_gpucomp.engine.agreement import CallResult
from mpi_gpucomp.engine.control_messages import FailureReport, clip, encode
from mpi_gpucomp.errors import AgreementError, DeadlockError, GpucompError, PeerError, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpi_gpucomp.core.wire import Wire
    from mpi_gpucomp.engine.agreement import CallId
    from mpi_gpucomp.engine.scheduling import Job

__all__ = ["DeadlockedCall", "Failure", "SignatureMismatch", "deadlock_error", "report_for"]

GRACE = 1.0
"""Seconds in which a rank that has not joined a failed call may still join and report."""


class SignatureMismatch(Exception):
    """A neighbour has joined the call with another signature."""


class DeadlockedCall(Exception):
    """The ranks wait for each other; the text names them and their calls."""


def report_for(
    peer: int, call: CallId, result: CallResult | None, error: BaseException | None = None, *, answer: bool = False
) -> FailureReport:
    """Make the report for one peer; `result` is what this rank did in the call, None if it has not joined."""
    kind, text = (type(error).__name__, clip(str(error))) if error else (None, "")
    if result is None:
        return FailureReport(*call, answer, None, kind, text, {}, None)
    sent = {channel: count for (to, channel), count in result.sent.items() if to == peer}
    return FailureReport(*call, answer, result.signature, kind, text, sent, result.trace)


class Failure:
    """A call that has failed on some rank, until all ranks have reported and nothing is in flight."""

    def __init__(self, call: CallId, wire: Wire, timeout: float) -> None:
        """Start without reports; peers have `timeout` seconds to report."""
        self.call, self._wire = call, wire
        self.job: Job | None = None
        self.settled = False
        """Whether all ranks have reported and nothing is in flight any more."""
        self._undrained = False
        self._error: BaseException | None = None
        self._reports: dict[int, FailureReport] = {}
        now = time.monotonic()
        self._report_by, self._give_up = now + GRACE, now + GRACE + timeout

    def join(self, job: Job, error: BaseException | None = None) -> None:
        """Stop this rank's job, for its own error or because another rank has one, and report to all."""
        self.job, self._error = job, error
        job.task.abandon()
        self._report(CallResult(job.full_signature, job.task.sent, job.trace), error)

    def on_report(self, peer: int, report: FailureReport) -> None:
        """Take a peer's report; a rank that has reported its error may answer again when it has ended the call."""
        if report.error or not (peer in self._reports and self._reports[peer].error):
            self._reports[peer] = report

    def progress(self) -> bool:
        """Make progress; return True if the failure has just been settled."""
        if self.settled:
            return False
        now = time.monotonic()
        if self._wire.rank not in self._reports and now > self._report_by:
            self._report(None)
        if len(self._reports) < self._wire.size and now < self._give_up:
            return False
        if self.job is not None and not self.job.task.drain(self._owed()):
            if now < self._give_up:
                return False
            self._undrained = True
        self.settled = True
        return True

    def _report(self, result: CallResult | None, error: BaseException | None = None) -> None:
        for peer in range(self._wire.size):
            report = report_for(peer, self.call, result, error)
            if peer == self._wire.rank:
                self._reports[peer] = report
            else:
                self._wire.send_control(peer, encode(report))

    def _owed(self) -> dict[tuple[int, int], int]:
        """Return how many messages have been sent to this rank, by peer and channel."""
        return {(peer, channel): n for peer, report in self._reports.items() for channel, n in report.sent.items()}

    @property
    def missing(self) -> list[int]:
        """Return the ranks that have not reported."""
        return [rank for rank in range(self._wire.size) if rank not in self._reports]

    def error(self, title: str) -> BaseException:
        """Make the error that this rank raises."""
        errors = {report.error: report.text for report in self._reports.values() if report.error}
        if self.missing or self._undrained:
            return self._unsettled(title)
        if DeadlockedCall.__name__ in errors:
            return deadlock_error(errors[DeadlockedCall.__name__], self._wire.rank)
        if SignatureMismatch.__name__ in errors:
            return self._mismatch(title)
        if self._error is not None:
            return self._error
        return self._peer_error(title)

    def _mismatch(self, title: str) -> GpucompError:
        signatures = {rank: report.signature or "not called yet" for rank, report in sorted(self._reports.items())}
        if self.diverged:
            signatures = {rank: f"{text}, after other native MPI calls" for rank, text in signatures.items()}
        same = "Pass the same count, type, root, operation, codec, chunk and algorithm on every rank."
        return AgreementError(
            title,
            expected="the same calls on every rank" if self.diverged else "the same call on every rank",
            got=_by_rank(signatures),
            remedy=f"{same} This communicator cannot be used any more." if self.diverged else same,
            rank=self._wire.rank,
        )

    @property
    def diverged(self) -> bool:
        """Return True if the ranks made different native MPI calls before, whose messages cannot match any more."""
        return len({report.trace for report in self._reports.values()} - {None}) > 1

    def _peer_error(self, title: str) -> GpucompError:
        errors = {rank: report for rank, report in sorted(self._reports.items()) if report.error}
        return PeerError(
            title,
            expected="success on every rank",
            got="; ".join(f"on rank {rank} {one.error}: {one.text.removesuffix('.')}" for rank, one in errors.items()),
            remedy="Fix the error there. The output here is incomplete; the communicator can still be used.",
            rank=self._wire.rank,
        )

    def _unsettled(self, title: str) -> GpucompError:
        silent = f"no report from {', '.join(f'rank {rank}' for rank in self.missing)}"
        error = RankFailedError(
            title,
            expected="every rank to report after it failed, and all messages to arrive",
            got=silent if self.missing else "messages still in flight",
            remedy="Make a new communicator without the failed ranks; this one cannot be used any more.",
            rank=self._wire.rank,
        )
        error.__cause__ = self._error
        return error


def deadlock_error(text: str, rank: int) -> DeadlockError:
    """Make the error of ranks that wait for each other."""
    return DeadlockError(
        "collectives",
        expected="every rank to join the calls that others wait for",
        got=text,
        remedy="Start collectives before waiting for others, or wait for them in the same order on every rank.",
        rank=rank,
    )


def _by_rank(texts: Mapping[int, str]) -> str:
    """List the text of each rank, grouping ranks with the same one."""
    ranks: dict[str, list[str]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(str(rank))
    return "; ".join(f"rank{'s' * (len(who) > 1)} {', '.join(who)}: {text}" for text, who in ranks.items())
