"""The monitor of this process: its trace buffer, its alarms and its exporters; made by the first communicator."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpi_gpucomp.monitor import files, settings
from mpi_gpucomp.monitor.diagnosis import ALARM_KINDS, HANG, STALL
from mpi_gpucomp.monitor.exporters import Exporter
from mpi_gpucomp.monitor.flight import FlightRecorder
from mpi_gpucomp.monitor.processor import ThreadCounters
from mpi_gpucomp.monitor.recorder import Recorder
from mpi_gpucomp.monitor.trace_buffer import LinkState, ProcessState, TraceBuffer
from mpi_gpucomp.trace import SEND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.monitor.detector import AnomalyDetector
    from mpi_gpucomp.monitor.diagnosis import Diagnosis
    from mpi_gpucomp.monitor.links import LinkStats
    from mpi_gpucomp.monitor.recorder import CommRecorder
    from mpi_gpucomp.monitor.settings import MonitorSettings

__all__ = ["LOGGER", "Alarm", "Alarms", "ProcessMonitor", "process_monitor"]

LOGGER = logging.getLogger("mpi_gpucomp.monitor")
TRACE_NAME = "%h.%p.%r.trace"
MAX_ALARMS = 256
OVER_SECONDS = 3.0
"""How long after its last diagnosis an alarm is over."""
MOMENTARY = (STALL,)
"""Kinds of alarms that are over when they are raised."""


@dataclass
class Alarm:
    """An anomaly that was diagnosed."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    raised: float
    """Seconds since 1970."""
    over: bool = False
    logged: bool = True
    """Whether this rank logs it; the others only keep it."""


class Alarms:
    """The alarms of a process: raised once, kept while they last, and then over."""

    def __init__(self, buffer: TraceBuffer, rank: int, log: Path | None = None) -> None:
        """Write them to a trace buffer, and to a file if there is one."""
        self._buffer, self._rank, self._log = buffer, rank, log
        self.all: list[Alarm] = []
        self._active: dict[tuple[str, tuple[int, ...]], tuple[Alarm, float]] = {}
        self.counts: dict[str, int] = {}

    def add(self, diagnosis: Diagnosis, *, logged: bool = True) -> Alarm | None:
        """Raise an alarm, unless it is active; `logged` on the rank that reports it."""
        key = diagnosis.kind, diagnosis.ranks
        if key in self._active:
            self._active[key] = self._active[key][0], time.monotonic()
            return None
        alarm = Alarm(*key, diagnosis.text, time.time(), diagnosis.kind in MOMENTARY, logged)
        self.all = [*self.all[-MAX_ALARMS + 1 :], alarm]
        self.counts[diagnosis.kind] = self.counts.get(diagnosis.kind, 0) + 1
        if not alarm.over:
            self._active[key] = alarm, time.monotonic()
        self._write(alarm.text, logged=logged)
        return alarm

    def expire(self) -> list[Alarm]:
        """End the alarms that were not diagnosed again for a while, and return them."""
        now = time.monotonic()
        gone = [key for key, (_, seen) in self._active.items() if now - seen > OVER_SECONDS and key[0] != HANG]
        return [self._end(key) for key in gone]

    def end_hangs(self) -> list[Alarm]:
        """End hangs: there is progress again."""
        return [self._end(key) for key in [key for key in self._active if key[0] == HANG]]

    def _end(self, key: tuple[str, tuple[int, ...]]) -> Alarm:
        alarm, _ = self._active.pop(key)
        alarm.over = True
        self._write(f"over after {time.time() - alarm.raised:.1f} s: {alarm.text}", logged=alarm.logged)
        return alarm

    @property
    def active(self) -> list[Alarm]:
        """Return the alarms that are not over."""
        return [alarm for alarm, _ in self._active.values()]

    def _write(self, text: str, *, logged: bool) -> None:
        stamp = time.strftime("%H:%M:%S")
        self._buffer.alarm(f"{stamp} {text}")
        if logged:
            LOGGER.warning("rank %d: %s", self._rank, text)
        if self._log is not None:
            try:
                files.append(self._log, f"{time.strftime('%Y-%m-%d')} {stamp} rank {self._rank}: {text}\n")
            except OSError as error:  # such as a full disk: the program goes on
                LOGGER.warning("rank %d: no more alarms in %s: %s", self._rank, self._log, error)
                self._log = None


class ProcessMonitor:
    """What all communicators of a process share."""

    def __init__(self, chosen: MonitorSettings, rank: int, size: int) -> None:
        """Monitor this rank of the world."""
        self.settings, self.rank, self.size, self.host = chosen, rank, size, settings.host_name()
        path = None
        if chosen.directory is not None:
            path = Path(chosen.directory) / settings.fill(TRACE_NAME, rank).name
        self.buffer = TraceBuffer.make(chosen.records, path)
        self.buffer.begin(rank, size, self.host)
        self.recorder = Recorder(self.buffer)
        log = settings.fill(chosen.log, rank) if chosen.log else None
        self.alarms = Alarms(self.buffer, rank, log)
        self.threads = ThreadCounters()
        self.detectors: weakref.WeakSet[AnomalyDetector] = weakref.WeakSet()
        """Those of the communicators in use."""
        self._flight = FlightRecorder(self, chosen.flight) if chosen.flight else None
        self._exporter = Exporter(self) if chosen.csv or chosen.prometheus or chosen.serve else None

    def set_clock(self, offset: int, uncertainty: int) -> None:
        """Set how this clock relates to that of rank 0, see `TraceHeader`."""
        self.buffer.begin(self.rank, self.size, self.host, offset, uncertainty)

    def write_state(self, *, closed: bool = False) -> None:
        """Write totals and links to the trace buffer: a heartbeat for its readers."""
        counters = [comm.counters for comm in self.recorder.comms]
        state = ProcessState(
            begun=self.recorder.begun,
            ended=self.recorder.ended,
            raw_bytes=sum(one.raw_bytes for one in counters),
            encoded_bytes=sum(one.encoded_bytes for one in counters),
            join_wait=sum(one.join_wait for one in counters),
            closed=closed,
            alarms=tuple(self.alarms.counts.get(kind, 0) for kind in ALARM_KINDS),
        )
        self.buffer.write_state(state)
        self.buffer.write_links(self.links())

    def links(self, only: CommRecorder | None = None) -> list[LinkState]:
        """Return the links of one communicator or of all, merged by peer and rail, with their transfers in flight."""
        in_flight: dict[tuple[int, int], list[int]] = {}
        for detector in list(self.detectors):
            for transfer in detector.in_flight():
                if transfer.kind == SEND:
                    in_flight.setdefault((transfer.peer, transfer.rail), []).append(transfer.nbytes)
        found: dict[tuple[int, int], list[LinkStats]] = {}
        for comm in [only] if only else self.recorder.comms:
            for key, link in list(comm.counters.links.items()):
                found.setdefault(key, []).append(link)
        return [_merge(links, in_flight.get(key, [])) for key, links in found.items()]

    def detach(self, detector: AnomalyDetector) -> None:
        """Forget a communicator that is freed; close the files of the thread counters with the last one."""
        self.detectors.discard(detector)
        if not self.detectors:
            self.threads.close()

    def record_flight(self, reason: str) -> None:
        """Write a flight record, if the settings name a directory for it."""
        if self._flight is not None:
            self._flight.write(reason)

    def close(self) -> None:
        """Write the last state: the process ends."""
        if self._exporter is not None:
            self._exporter.close()
        self.recorder.collect()
        self.write_state(closed=True)


def _merge(links: Sequence[LinkStats], in_flight: Sequence[int]) -> LinkState:
    newest = max(links, key=lambda link: link.last)
    return LinkState(
        peer=newest.peer,
        rail=newest.rail,
        chunks=sum(link.chunks for link in links),
        nbytes=sum(link.nbytes for link in links),
        bandwidth=newest.recent,
        mean=newest.before or newest.mean,
        bytes_in_flight=sum(in_flight),
        chunks_in_flight=len(in_flight),
        slow=any(link.is_slow(link.last) for link in links),
    )


_lock = threading.Lock()
_monitors: list[ProcessMonitor] = []


def process_monitor(chosen: MonitorSettings, rank: int, size: int) -> ProcessMonitor:
    """Return the monitor of this process; the first caller's settings hold."""
    with _lock:
        if not _monitors:
            _monitors.append(ProcessMonitor(chosen, rank, size))
            atexit.register(_monitors[0].close)
        return _monitors[0]
