"""The monitor of this process: one box, its alarms, and what is written besides; made by the first communicator."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpi_gpucomp.monitor import settings
from mpi_gpucomp.monitor.diagnosis import ALARM_KINDS, HANG, STALL
from mpi_gpucomp.monitor.exporters import Writer
from mpi_gpucomp.monitor.flight import Flight
from mpi_gpucomp.monitor.processor import ThreadCounters
from mpi_gpucomp.monitor.recorder import Recorder
from mpi_gpucomp.monitor.trace_buffer import LinkState, State, TraceBuffer
from mpi_gpucomp.trace import SEND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.monitor.detector import AnomalyDetector
    from mpi_gpucomp.monitor.diagnosis import Diagnosis
    from mpi_gpucomp.monitor.links import LinkStats
    from mpi_gpucomp.monitor.recorder import CommRecorder
    from mpi_gpucomp.monitor.settings import MonitorSettings

__all__ = ["LOGGER", "Alarm", "Alarms", "ProcessMonitor", "known", "process_monitor"]


# Alarms: raised once, kept while they last, and taken back; told to Python's logging, the box and a file.

LOGGER = logging.getLogger("mpi_gpucomp.monitor")
KEPT = 256
OVER_SECONDS = 3.0
"""How long after it was last seen an alarm is taken back."""
AT_ONCE = (STALL,)
"""Kinds that are over when they are found."""


@dataclass
class Alarm:
    """What was found, with whom, when, and whether it is over."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    found: float
    """Seconds since 1970."""
    over: bool = False
    loud: bool = True


class Alarms:
    """The alarms that a rank knows of."""

    def __init__(self, box: TraceBuffer, rank: int, log: Path | None = None) -> None:
        """Keep them in a box, and add them to a file if there is one."""
        self._box, self._rank, self._log = box, rank, log
        self.all: list[Alarm] = []
        self._lasting: dict[tuple[str, tuple[int, ...]], tuple[Alarm, float]] = {}
        self.counts: dict[str, int] = {}

    def has(self, verdict: Diagnosis) -> bool:
        """Say whether this is known, and note that it lasts."""
        known = self._lasting.get((verdict.kind, verdict.ranks))
        if known is not None:
            self._lasting[verdict.kind, verdict.ranks] = known[0], time.monotonic()
        return known is not None

    def add(self, verdict: Diagnosis, *, loud: bool = True) -> Alarm | None:
        """Raise an alarm, unless it is known; `loud` where this rank is the one to say it."""
        if self.has(verdict):
            return None
        alarm = Alarm(verdict.kind, verdict.ranks, verdict.text, time.time(), verdict.kind in AT_ONCE, loud)
        self.all = [*self.all[-KEPT + 1 :], alarm]
        self.counts[verdict.kind] = self.counts.get(verdict.kind, 0) + 1
        if not alarm.over:
            self._lasting[verdict.kind, verdict.ranks] = alarm, time.monotonic()
        self._say(alarm.text, loud=loud)
        return alarm

    def expire(self) -> list[Alarm]:
        """Take back what has not been seen for a while, and return it."""
        now = time.monotonic()
        gone = [key for key, (_, seen) in self._lasting.items() if now - seen > OVER_SECONDS and key[0] != HANG]
        return [self._end(key) for key in gone]

    def moved(self) -> list[Alarm]:
        """Take back hangs: something has moved again."""
        return [self._end(key) for key in [key for key in self._lasting if key[0] == HANG]]

    def _end(self, key: tuple[str, tuple[int, ...]]) -> Alarm:
        alarm, _ = self._lasting.pop(key)
        alarm.over = True
        self._say(f"over after {time.time() - alarm.found:.1f} s: {alarm.text}", loud=alarm.loud)
        return alarm

    @property
    def lasting(self) -> list[Alarm]:
        """Return those that are not over."""
        return [alarm for alarm, _ in self._lasting.values()]

    def _say(self, text: str, *, loud: bool) -> None:
        stamp = time.strftime("%H:%M:%S")
        self._box.alarm(f"{stamp} {text}")
        if loud:
            LOGGER.warning("rank %d: %s", self._rank, text)
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d')} {stamp} rank {self._rank}: {text}\n")


class ProcessMonitor:
    """What all communicators of a process share."""

    def __init__(self, chosen: MonitorSettings, rank: int, size: int) -> None:
        """Be this rank of the world."""
        self.settings, self.rank, self.size, self.host = chosen, rank, size, settings.host_name()
        path = None
        if chosen.directory is not None:
            path = Path(chosen.directory) / settings.fill("%h.%p.%r.box", rank).name
        self.box = TraceBuffer.make(chosen.records, path)
        self.box.begin(rank, size, self.host)
        self.recorder = Recorder(self.box)
        log = settings.fill(chosen.log, rank) if chosen.log else None
        self.alarms = Alarms(self.box, rank, log)
        self.threads = ThreadCounters()
        self.detectors: weakref.WeakSet[AnomalyDetector] = weakref.WeakSet()
        """Those of the communicators in use."""
        self._flight = Flight(self, chosen.flight) if chosen.flight else None
        self._writer = Writer(self) if chosen.csv or chosen.prometheus or chosen.serve else None

    def set_clock(self, offset: int, doubt: int) -> None:
        """Take notice of how this clock relates to that of rank 0, see `Head`."""
        self.box.begin(self.rank, self.size, self.host, offset, doubt)

    def beat(self, *, closed: bool = False) -> None:
        """Let readers see that this process is alive, and how far it is."""
        tallies = [group.tally for group in self.recorder.groups]
        state = State(
            *(self.recorder.begun, self.recorder.ended),
            *(sum(tally.plain for tally in tallies), sum(tally.encoded for tally in tallies)),
            *(sum(tally.waited for tally in tallies), closed),
            tuple(self.alarms.counts.get(kind, 0) for kind in ALARM_KINDS),
        )
        self.box.write_state(state)
        self.box.write_links(self.links())

    def links(self, only: CommRecorder | None = None) -> list[LinkState]:
        """Return the links of one communicator, or of all, those to one peer together, with what is under way."""
        waiting: dict[tuple[int, int], list[int]] = {}
        for detector in list(self.detectors):
            for transfer in detector.in_flight():
                if transfer.kind == SEND:
                    waiting.setdefault((transfer.peer, transfer.rail), []).append(transfer.nbytes)
        found: dict[tuple[int, int], list[LinkStats]] = {}
        for group in [only] if only else self.recorder.groups:
            for key, link in list(group.tally.links.items()):
                found.setdefault(key, []).append(link)
        return [_together(links, waiting.get(key, [])) for key, links in found.items()]

    def detach(self, detector: AnomalyDetector) -> None:
        """Forget a communicator that is freed; close the files of the thread counters with the last one."""
        self.detectors.discard(detector)
        if not self.detectors:
            self.threads.close()

    def record_flight(self, reason: str) -> None:
        """Write down what goes on, because something is wrong, if the settings say where to."""
        if self._flight is not None:
            self._flight.write(reason)

    def close(self) -> None:
        """Let readers see that it has come to its end."""
        if self._writer is not None:
            self._writer.close()
        self.recorder.collect()
        self.beat(closed=True)


def _together(links: Sequence[LinkStats], waiting: Sequence[int]) -> LinkState:
    newest = max(links, key=lambda link: link.last)
    return LinkState(
        *(newest.peer, newest.rail, sum(link.count for link in links), sum(link.sent for link in links)),
        *(newest.recent, newest.before or newest.mean, sum(waiting), len(waiting)),
        any(link.is_slow(link.last) for link in links),
    )


_lock = threading.Lock()
_station: ProcessMonitor | None = None


def known() -> ProcessMonitor | None:
    """Return the monitor of this process, if there is one."""
    return _station


def process_monitor(chosen: MonitorSettings, rank: int, size: int) -> ProcessMonitor:
    """Return the monitor of this process; the first who asks says what it is like."""
    global _station
    with _lock:
        if _station is None:
            _station = ProcessMonitor(chosen, rank, size)
            atexit.register(_station.close)
        return _station
