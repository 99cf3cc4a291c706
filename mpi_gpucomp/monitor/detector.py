"""Detection of anomalies while they last: local symptoms, then one comparison of all ranks.

Symptoms are local: a link far below its own mean, calls that take twice as long as before, ranks that join late, a
stall, or no progress at all. Their cause shows only when all ranks are compared. Rank 0 of the communicator asks all
ranks for a summary of their last second when it has a symptom or is sent one; in a hang, every blocked rank does.
Without symptoms no messages are exchanged.
"""

from __future__ import annotations

import time
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.errors import RankFailedError
from mpi_gpucomp.monitor.diagnosis import (
    HANG,
    LATE,
    SUMMARY_NS,
    Diagnosis,
    RankSummary,
    diagnose,
    diagnose_hang,
    diagnose_silence,
    summarize,
)
from mpi_gpucomp.monitor.process_monitor import LOGGER
from mpi_gpucomp.monitor.processor import STALL_NS, CpuUsage, StallDetector
from mpi_gpucomp.trace import SEND, Observer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.monitor.process_monitor import ProcessMonitor
    from mpi_gpucomp.monitor.recorder import CommRecorder
    from mpi_gpucomp.trace import EngineSnapshot, InFlight, ObservedEngine

__all__ = ["AnomalyDetector", "attach", "ignore_messages"]

CHECK_NS, SOON_NS = 300_000_000, 25_000_000
"""Nanoseconds between checks, without and with something pending."""
ASK_NS, LATE_AGAIN_NS = 400_000_000, 2_000_000_000
"""Nanoseconds between requests for summaries, and between those because of ranks that join late."""
NOTE_NS, SELDOM_NS = 1_000_000, 20_000_000
"""Nanoseconds between notes of this thread's CPU counters while it waits, and where only long stalls count."""
SETTLED_CALLS = 3
"""Calls of a communicator in which stalls do not count: MPI makes its connections in the first ones."""
ANSWER_SECONDS = 1.0
"""How long a rank has to answer before it counts as silent."""
ASK, SUMMARY, SYMPTOM, ALARM = "monitor.ask", "monitor.summary", "monitor.symptom", "monitor.alarm"
"""The kinds of the monitor's control messages."""


def attach(engine: ObservedEngine, world: Sequence[int], process: ProcessMonitor) -> AnomalyDetector:
    """Observe an engine; `world` are its communicator's ranks in the world."""
    trace = process.recorder.communicator(world, engine.rank)
    detector = AnomalyDetector(engine, trace, process)
    engine.attach(trace, detector)
    return detector


def ignore_messages(engine: ObservedEngine) -> None:
    """Ignore the monitor's messages on a rank without a monitor."""
    for kind in (ASK, SUMMARY, SYMPTOM, ALARM):
        engine.listen(kind, _ignore)


def _ignore(peer: int, number: int, text: str) -> None:
    """Drop a control message."""


class _Votes(NamedTuple):
    """How often a diagnosis was made of late."""

    made: int
    """With new evidence each time, less how often another diagnosis was made, or none."""
    times: int
    """How often it must be made: the most that one of them asked for."""
    evidence: int
    """Of the last one."""


class _Poll:
    """One request for the summaries of all ranks."""

    def __init__(self, number: int, own: RankSummary, *, hang: bool) -> None:
        self.number, self.hang, self.asked = number, hang, time.monotonic()
        self.summaries = {own.rank: own}


class AnomalyDetector(Observer):
    """Observes the engine of one communicator."""

    def __init__(self, engine: ObservedEngine, trace: CommRecorder, process: ProcessMonitor) -> None:
        """Listen to the monitors of the other ranks."""
        self._engine, self.trace, self.process = engine, trace, process
        self._enabled = True
        self._polled = self._waited = self._naps = self._check_at = self._count_at = self._ask_at = self._late_at = 0
        self._second, self._waited_before, self._late, self._note_at = 0, 0, False, 0
        self._processor = CpuUsage(process.threads)
        self._stalls = StallDetector(engine, process, self._processor)
        self._poll: _Poll | None = None
        self._votes: dict[tuple[str, tuple[int, ...]], _Votes] = {}
        self._numbers, self._has_news, self._hang_asked, self._seen = 0, False, 0.0, -1
        engine.listen(ASK, self._on_ask)
        engine.listen(SUMMARY, self._on_summary)
        engine.listen(SYMPTOM, self._on_symptom)
        engine.listen(ALARM, self._on_alarm)
        process.detectors.add(self)

    def snapshot(self) -> EngineSnapshot:
        """Return the state of the engine's calls."""
        return self._engine.snapshot()

    def in_flight(self) -> list[InFlight]:
        """Return the transfers that have not completed; their peers are ranks of the world."""
        world = self.trace.world
        return [transfer._replace(peer=world[transfer.peer]) for transfer in self._engine.snapshot().in_flight]

    def close(self) -> None:
        """Stop observing: the communicator is freed."""
        self._enabled = False
        self.process.detach(self)

    # Events of the engine

    def on_poll(self, waiting: int, naps: int) -> None:
        """Notice a gap since the last poll, and check from time to time."""
        if not self._enabled:
            return
        now = perf_counter_ns()
        before, is_gap = self._polled, waiting and self._waited == waiting and now - self._polled > STALL_NS
        self._polled, self._waited, self._naps = now, waiting, naps
        if not is_gap and now < self._check_at:
            return
        try:
            if is_gap and self.trace.ended >= SETTLED_CALLS:
                self._has_news |= self._stalls.check(before, now, naps)
            if now >= self._check_at or self._stalls:
                self._check(now)
        except RankFailedError:
            raise
        except Exception:  # a defect of the monitor must not end the program
            LOGGER.exception("the monitor has failed and is disabled for this communicator")
            self._enabled = False

    def on_idle(self) -> None:
        """Note this thread's CPU counters before it sleeps."""
        if not self._waited or not self._enabled:
            return
        now = perf_counter_ns()
        if now > self._note_at:
            self._note_at = now + (SELDOM_NS if self._processor.pressure else NOTE_NS)
            self._processor.note(now, self._naps)

    def on_failure(self, reason: str) -> None:
        """Write a flight record."""
        self.process.record_flight(reason)

    # Symptoms

    def _check(self, now: int) -> None:
        if self._poll is not None:
            self._settle(self._poll)
        for stall in self._stalls.flush(now):
            self._raise(stall)
        if now > self._count_at:
            self._count_at = now + CHECK_NS
            self._check_for_hang()
            self.process.alarms.expire()
            self._count(now)
        if self._has_news and self._poll is None and now > self._ask_at:
            self._ask_at, self._has_news = now + ASK_NS, False
            self._report()
        self._check_at = now + (SOON_NS if self._has_news or self._poll or self._stalls else CHECK_NS)

    def _count(self, now: int) -> None:
        """Count new records, if calls are in progress or were, and look for symptoms."""
        recorder = self.trace.recorder
        if not recorder.begun == recorder.ended == self._seen:
            self._seen = recorder.ended
            recorder.collect()
            self._processor.sample()
            self._has_news |= self._has_symptom(now)
        if self.process.buffer.path is not None:  # other processes may read it
            self.process.write_state()

    def _is_late(self, now: int) -> bool:
        """Return True if calls of the last second waited long for ranks to join them."""
        if now - self._second > SUMMARY_NS:
            self._late = self.trace.counters.join_wait - self._waited_before > LATE * (now - self._second)
            self._second, self._waited_before = now, self.trace.counters.join_wait
        return self._late

    def _has_symptom(self, now: int) -> bool:
        counters = self.trace.counters
        links = counters.links.values()
        if counters.calls.slow or counters.codec.share < 1 or any(link.is_slow(now) for link in links):
            return True
        if any(link.is_stuck(now) for link in links) and any(one.kind == SEND for one in self.in_flight()):
            return True
        if self._is_late(now) and now > self._late_at:  # often only the rank that the data reach last: not each time
            self._late_at = now + LATE_AGAIN_NS
            return True
        return False

    def _report(self) -> None:
        """Ask all ranks for summaries, or rank 0 to do so."""
        if self._engine.rank == 0:
            self._ask(hang=False)
        else:
            self._engine.send_control(0, SYMPTOM)

    def _check_for_hang(self) -> None:
        since, now, hang = self._engine.blocked_since(), time.monotonic(), self.process.settings.hang
        if since is None or now - since < hang:
            if self._hang_asked:
                self._hang_asked = 0.0
                self.process.alarms.end_hangs()
        elif not (self._poll and self._poll.hang) and now - self._hang_asked > hang:
            self._hang_asked = now
            self._ask(hang=True)

    # Messages

    def _summary(self) -> RankSummary:
        self.trace.recorder.collect()
        state = self._engine.snapshot()
        own = summarize(self.trace, perf_counter_ns(), state.in_flight)
        own.host, own.begun, own.waits = self.process.host, state.begun, [wait.title for wait in state.waits]
        own.delayed, own.stalled = self._processor.delayed(own.clock), self._processor.stalled(own.clock)
        own.cpu_pressure = self._processor.pressure
        return own

    def _ask(self, *, hang: bool) -> None:
        self._numbers += 1
        self._poll = _Poll(self._numbers, self._summary(), hang=hang)
        self._engine.broadcast_control(ASK, self._numbers)

    def _on_ask(self, peer: int, number: int, text: str) -> None:
        if self._enabled:
            self._engine.send_control(peer, SUMMARY, number, self._summary().to_json())

    def _on_summary(self, peer: int, number: int, text: str) -> None:
        if self._poll is None or self._poll.number != number:
            return
        try:
            summary = RankSummary.from_json(text)
            if summary.rank != self.trace.world[peer]:
                raise ValueError(f"it is of rank {summary.rank}")
        except ValueError as error:
            LOGGER.error("rank %d: malformed summary from rank %d: %s", self._engine.rank, peer, error)
            return
        self._poll.summaries[summary.rank] = summary
        self._check_at = 0

    def _on_symptom(self, peer: int, number: int, text: str) -> None:
        self._has_news, self._check_at = True, 0

    def _on_alarm(self, peer: int, number: int, text: str) -> None:
        try:
            diagnosis = Diagnosis.from_json(text)
        except ValueError as error:
            LOGGER.error("rank %d: malformed alarm from rank %d: %s", self._engine.rank, peer, error)
            return
        self.process.alarms.add(diagnosis, logged=False)
        self._record_hang(diagnosis)

    # Diagnoses

    def _settle(self, poll: _Poll) -> None:
        """Diagnose once all ranks have answered, or had their time."""
        complete = len(poll.summaries) == self._engine.size
        if not complete and time.monotonic() - poll.asked < ANSWER_SECONDS:
            return
        self._poll = None
        LOGGER.debug("summaries: %s", poll.summaries)
        if poll.hang:
            self._settle_hang(poll)
        elif complete:
            self._suspect(diagnose(poll.summaries))
        elif self._has_moved_since(poll.asked):  # otherwise it is a hang, if it lasts
            self._suspect(diagnose_silence(poll.summaries, self.trace.world, ANSWER_SECONDS))

    def _has_moved_since(self, asked: float) -> bool:
        since = self._engine.blocked_since()
        return since is None or since > asked

    def _suspect(self, diagnosis: Diagnosis | None) -> None:
        """Raise the alarm once a diagnosis was made often enough; any other one counts against it."""
        self._has_news = diagnosis is not None
        key = diagnosis[:2] if diagnosis else None
        others = {
            other: votes._replace(made=votes.made - 1)
            for other, votes in self._votes.items()
            if other != key and votes.made > 1
        }
        if diagnosis is None or key is None:
            self._votes = others
            return
        before = self._votes.get(key, _Votes(0, 0, 0))
        is_new = not diagnosis.evidence or diagnosis.evidence != before.evidence
        times = max(before.times, diagnosis.times)
        self._votes = {**others, key: _Votes(min(before.made + is_new, times), times, diagnosis.evidence)}
        if self._votes[key].made == times:
            self._raise(diagnosis)

    def _settle_hang(self, poll: _Poll) -> None:
        """Raise the alarm, if this is the first blocked rank."""
        since, now, own = self._engine.blocked_since(), time.monotonic(), self.trace.world[self.trace.rank]
        blocked = [rank for rank in self.trace.world if rank in poll.summaries and poll.summaries[rank].waits]
        if since is not None and now - since >= self.process.settings.hang and blocked[:1] == [own]:
            self._raise(diagnose_hang(poll.summaries, self.trace.world, now - since))

    def _record_hang(self, diagnosis: Diagnosis) -> None:
        if diagnosis.kind == HANG:
            self.process.record_flight(diagnosis.text)

    def _raise(self, diagnosis: Diagnosis) -> None:
        self._record_hang(diagnosis)
        if self.process.alarms.add(diagnosis) is not None:
            self._engine.broadcast_control(ALARM, text=diagnosis.to_json())
