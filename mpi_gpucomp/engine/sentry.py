"""Finds out what is wrong while it lasts: notices symptoms here, asks all ranks for their last second, and judges.

Symptoms are local: a link far below its own mean, calls that take twice as long as they did, ranks that are waited for,
a standstill, or nothing that moves at all. Who is behind them shows only when all ranks are compared. The first rank of
the communicator does that when it has, or hears of, a symptom; of a hang, whoever waits. While all is well nobody asks.
"""

from __future__ import annotations

import pickle
import time
from time import perf_counter_ns
from typing import TYPE_CHECKING

from mpi_gpucomp.engine.stalls import STALL_NS, StallDetector
from mpi_gpucomp.errors import RankFailedError
from mpi_gpucomp.monitor.diagnosis import (
    HANG,
    LATE,
    LOOKED_AT_NS,
    Diagnosis,
    RankSummary,
    diagnose,
    diagnose_hang,
    diagnose_silence,
    summarize,
)
from mpi_gpucomp.monitor.process_monitor import LOGGER
from mpi_gpucomp.monitor.processor import CpuUsage
from mpi_gpucomp.monitor.trace_buffer import SEND

if TYPE_CHECKING:
    from mpi_gpucomp.engine.deadlock import DeadlockDetector
    from mpi_gpucomp.monitor.process_monitor import ProcessMonitor
    from mpi_gpucomp.monitor.recorder import TraceGroup
    from mpi_gpucomp.transport.base import Transport

__all__ = ["IDLE_TURNS", "AnomalyDetector"]

LOOK_NS, SOON_NS = 300_000_000, 25_000_000
"""Nanoseconds between looks, and while something is not settled."""
ASK_NS, LATE_AGAIN_NS = 400_000_000, 2_000_000_000
"""Nanoseconds between questions, and those because of ranks that join late."""
NOTE_NS, SELDOM_NS = 1_000_000, 20_000_000
"""Nanoseconds between notes of this thread's counts while it waits, and where only long stalls count."""
IDLE_TURNS = 3
"""Turns without a move from which on there is time to take notes."""
SETTLED_CALLS = 3
"""Calls of a communicator that may stand still: in the first ones MPI makes its connections."""
ANSWER_SECONDS = 1.0
"""How long a rank has to answer before it counts as one that does not."""


class _Question:
    def __init__(self, number: int, own: RankSummary, *, hang: bool) -> None:
        self.number, self.hang, self.asked = number, hang, time.monotonic()
        self.told = {own.rank: own}


class AnomalyDetector:
    """One communicator's."""

    def __init__(
        self, transport: Transport, watch: DeadlockDetector, group: TraceGroup | None, station: ProcessMonitor | None
    ) -> None:
        """Do nothing where nothing is recorded."""
        self._transport, self._watch, self._group, self._station = transport, watch, group, station
        self._turned = self._waited = self._naps = self._look_at = self._count_at = self._ask_at = self._late_at = 0
        self._second, self._waited_before, self._late, self._note_at = 0, 0, False, 0
        self.idle = 0
        """Turns since something moved; counted by the engine, to whom a call more in every turn would matter."""
        self._processor = CpuUsage()
        self._stalls = StallDetector(watch, station, self._processor) if station is not None else None
        self._question: _Question | None = None
        self._votes: dict[tuple[str, tuple[int, ...]], int] = {}
        """How often each verdict was said of late, less how often another one, or none."""
        self._numbers, self._told_of, self._hang_asked, self._seen = 0, False, 0.0, -1

    def turn(self, waiting: int, naps: int) -> None:
        """Take notice of a turn of the engine.

        It is for a caller who does nothing but wait (a number for each wait) or 0, and has taken so many naps so far.
        """
        if self._group is None:
            return
        now = perf_counter_ns()
        before, is_gap = self._turned, waiting and self._waited == waiting and now - self._turned > STALL_NS
        self._turned, self._waited, self._naps = now, waiting, naps
        if not is_gap and now < self._look_at:
            return
        try:
            if is_gap and self._group.ended >= SETTLED_CALLS and self._stalls is not None:
                self._told_of |= self._stalls.check(before, now, naps)
            if now >= self._look_at or self._stalls:
                self._look(now)
        except RankFailedError:
            raise
        except Exception:  # whatever is wrong here must not take the program with it
            LOGGER.exception("the monitor has failed, and is off from now on")
            self._group = None

    def rest(self) -> None:
        """Take notes after a turn in which nothing has moved, before whoever waits rests."""
        if not self._waited or self._group is None:
            return
        now = perf_counter_ns()
        if now > self._note_at:
            self._note_at = now + (SELDOM_NS if self._processor.pressed else NOTE_NS)
            self._processor.note(now, self._naps)

    def _look(self, now: int) -> None:
        assert self._station is not None and self._stalls is not None
        if self._question is not None:
            self._settle(self._question)
        for stall in self._stalls.settle(now):
            self._raise(stall)
        if now > self._count_at:
            self._count_at = now + LOOK_NS
            self._look_for_hang()
            self._station.alarms.expire()
            self._count(now)
        if self._told_of and self._question is None and now > self._ask_at:
            self._ask_at, self._told_of = now + ASK_NS, False
            self._report()
        self._look_at = now + (SOON_NS if self._told_of or self._question or self._stalls else LOOK_NS)

    def _count(self, now: int) -> None:
        """Count what is new, if anything is under way or was, and see whether all is well."""
        assert self._group is not None and self._station is not None
        recorder = self._group.recorder
        if not recorder.begun == recorder.ended == self._seen:
            self._seen = recorder.ended
            recorder.collect()
            self._processor.sample()
            self._told_of |= self._has_symptom(now)
        if self._station.box.path is not None:  # other processes may read it
            self._station.beat()

    def _is_late(self, now: int) -> bool:
        """Say whether calls of the last second waited long for ranks to join them."""
        assert self._group is not None
        if now - self._second > LOOKED_AT_NS:
            self._late = self._group.tally.waited - self._waited_before > LATE * (now - self._second)
            self._second, self._waited_before = now, self._group.tally.waited
        return self._late

    def _has_symptom(self, now: int) -> bool:
        assert self._group is not None
        tally = self._group.tally
        links = tally.links.values()
        if tally.calls.slow or tally.pace.share < 1 or any(link.is_slow(now) for link in links):
            return True
        if any(link.is_quiet(now) for link in links) and any(one.kind == SEND for one in self._watch.under_way()):
            return True
        if self._is_late(now) and now > self._late_at:  # mostly the rank that the data reach last: not often
            self._late_at = now + LATE_AGAIN_NS
            return True
        return False

    def _report(self) -> None:
        """Ask all ranks, or tell the one who does."""
        if self._transport.rank == 0:
            self._ask(hang=False)
        else:
            self._transport.send_control(0, pickle.dumps(("symptom",)))

    def _look_for_hang(self) -> None:
        assert self._station is not None
        since, now = self._watch.waits_since(), time.monotonic()
        hang = self._station.settings.hang
        if since is None or now - since < hang:
            if self._hang_asked:
                self._hang_asked = 0.0
                self._station.alarms.moved()
        elif not (self._question and self._question.hang) and now - self._hang_asked > hang:
            self._hang_asked = now
            self._ask(hang=True)

    # Questions and answers

    def _own(self) -> RankSummary:
        assert self._group is not None and self._station is not None
        self._group.recorder.collect()
        own, status = summarize(self._group, perf_counter_ns(), self._watch.under_way()), self._watch.status()
        own.host, own.begun, own.waits = self._station.host, status.runs, list(status.waits.values())
        own.delayed, own.still = self._processor.delayed(own.clock), self._processor.still(own.clock)
        own.pressed = self._processor.pressed
        return own

    def _ask(self, *, hang: bool) -> None:
        self._numbers += 1
        self._question = _Question(self._numbers, self._own(), hang=hang)
        letter = pickle.dumps(("see", self._numbers))
        for peer in range(self._transport.size):
            if peer != self._transport.rank:
                self._transport.send_control(peer, letter)

    def hear_see(self, peer: int, number: int) -> None:
        """Tell a rank that asks."""
        if self._group is not None:
            self._transport.send_control(peer, pickle.dumps(("seen", number, self._own())))

    def hear_seen(self, peer: int, number: int, told: RankSummary) -> None:
        """Take an answer."""
        if self._question is not None and self._question.number == number:
            self._question.told[told.rank] = told
            self._look_at = 0

    def hear_symptom(self, peer: int) -> None:
        """Ask all ranks soon: one of them is not well."""
        self._told_of, self._look_at = True, 0

    def hear_alarm(self, peer: int, verdict: Diagnosis) -> None:
        """Keep an alarm that another rank has raised."""
        if self._station is not None:
            self._station.alarms.add(verdict, loud=False)
            self._record_hang(verdict)

    def _settle(self, question: _Question) -> None:
        """Judge once all have answered, or had their time."""
        complete = len(question.told) == self._transport.size
        if not complete and time.monotonic() - question.asked < ANSWER_SECONDS:
            return
        self._question = None
        LOGGER.debug("what the ranks tell: %s", question.told)
        if question.hang:
            self._settle_hang(question)
        elif complete:
            self._suspect(diagnose(question.told))
        elif self._has_moved_since(question.asked):  # or it is a hang, if it lasts
            assert self._group is not None
            self._suspect(diagnose_silence(question.told, self._group.world, ANSWER_SECONDS))

    def _has_moved_since(self, asked: float) -> bool:
        since = self._watch.waits_since()
        return since is None or since > asked

    def _suspect(self, verdict: Diagnosis | None) -> None:
        """Raise the alarm once a verdict has been the same often enough; any other one speaks against it."""
        self._told_of = verdict is not None
        key = verdict[:2] if verdict else None
        others = {one: votes - 1 for one, votes in self._votes.items() if one != key and votes > 1}
        if verdict is None or key is None:
            self._votes = others
            return
        votes = min(self._votes.get(key, 0) + 1, verdict.times)
        self._votes = {**others, key: votes}
        if votes == verdict.times:
            self._raise(verdict)

    def _settle_hang(self, question: _Question) -> None:
        """Raise the alarm, if this is the first of those who wait."""
        assert self._group is not None and self._station is not None
        since, now, own = self._watch.waits_since(), time.monotonic(), self._group.world[self._group.rank]
        waiting = [rank for rank in self._group.world if rank in question.told and question.told[rank].waits]
        if since is not None and now - since >= self._station.settings.hang and waiting[:1] == [own]:
            self._raise(diagnose_hang(question.told, self._group.world, now - since))

    def _record_hang(self, verdict: Diagnosis) -> None:
        if verdict.kind == HANG and self._station is not None:
            self._station.record_flight(verdict.text)

    def _raise(self, verdict: Diagnosis) -> None:
        assert self._station is not None
        self._record_hang(verdict)
        if self._station.alarms.add(verdict) is not None:
            letter = pickle.dumps(("alarm", verdict))
            for peer in range(self._transport.size):
                if peer != self._transport.rank:
                    self._transport.send_control(peer, letter)
