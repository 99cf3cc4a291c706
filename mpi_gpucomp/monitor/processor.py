"""CPU usage of this process: how long its threads waited for a processor, and its stalls, in which it did neither.

Linux counts for each thread how long it ran, and how long it was ready to run and had no processor. A process that was
stopped, or was blocked in a device or a page fault, did neither: that tells a stall from a busy machine. All Python
threads count, as each may wait for a lock that another holds. Linux also counts how often a thread went to sleep: more
often than it called sleep if it was stopped, but not if a hypervisor paused the whole machine. The time that a
hypervisor takes is counted too, though coarsely: a stall is held back for a moment until it is.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

try:
    from resource import RUSAGE_THREAD, getrusage
except ImportError:  # not Linux: there are no such counters
    getrusage = None  # type: ignore[assignment]

from mpi_gpucomp.monitor.diagnosis import STALL, SUMMARY_NS, Diagnosis

if TYPE_CHECKING:
    from mpi_gpucomp.monitor.process_monitor import ProcessMonitor
    from mpi_gpucomp.trace import ObservedEngine

__all__ = ["FREQUENT", "STALL_NS", "CpuUsage", "StallDetector", "ThreadCounters"]

SAMPLES = 16
FREQUENT = 5
"""Stalls in a second from which on they are not reported one by one."""
PRESSURE, MIN_STALL_NS = 60.0, 100_000_000
"""Where threads of the machine wait for processors for more than this percentage of the time, and the shortest stall
that counts there."""
MAX_BEFORE_NS = 1_500_000
"""How long a thread is taken to have run between its last note and a stall, at most."""
OTHERS_NS = 8_000_000
"""Nanoseconds between notes of the other threads."""

STALL_NS = 4_500_000
"""The shortest stall that counts.

A process that is stopped for 5 ms on a busy machine may stall for less: its threads need a processor to stop on.
"""
HELD_NS = 40_000_000
"""Nanoseconds until Linux has counted the time that a hypervisor took from the machine."""


class _Sample(NamedTuple):
    at: int
    delayed: dict[int, int]


class ThreadCounters:
    """Linux's scheduler counters of Python's threads: one set of open files per process."""

    def __init__(self) -> None:
        """Open no files yet."""
        self._open: dict[int, int] = {}
        self._renew_at = 0
        self._lock = threading.RLock()

    def read(self) -> dict[int, bytes]:
        """Return the counters of each thread, by its identity in Python."""
        with self._lock:
            if perf_counter_ns() > self._renew_at:
                self._renew_at = perf_counter_ns() + SUMMARY_NS
                self._renew()
            return {thread: self.of(thread) for thread in self._open}

    def of(self, thread: int) -> bytes:
        """Return the counters of one thread; nothing if they are unknown."""
        with self._lock:
            try:
                return os.pread(self._open[thread], 80, 0)
            except (KeyError, OSError):
                return b""

    def _renew(self) -> None:
        alive = {thread.ident: thread.native_id for thread in threading.enumerate() if thread.ident is not None}
        for gone in self._open.keys() - alive.keys():
            os.close(self._open.pop(gone))
        for thread in alive.keys() - self._open.keys():
            try:
                self._open[thread] = os.open(f"/proc/self/task/{alive[thread]}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue

    def close(self) -> None:
        """Close the files; a later `read` opens them again."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])
            self._renew_at = 0

    def __del__(self) -> None:
        """Close the files."""
        self.close()


class CpuUsage:
    """The CPU usage of this process, for one communicator."""

    def __init__(self, threads: ThreadCounters) -> None:
        """Start with no samples."""
        self._threads = threads
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES)
        # Noted before a sleep, and evaluated only after a gap.
        self._thread = self._noted_at = self._slept = self._others_at = 0
        self._own, self._others = b"", dict[int, bytes]()
        self.stolen_ticks = _stolen_ticks()
        """At the last sample; not read again on a machine whose hypervisor takes nothing."""
        self.pressure = False
        """Whether threads of the machine waited for processors most of the time, at the last sample."""
        self._stalls: deque[tuple[int, int]] = deque(maxlen=128)

    def sample(self) -> None:
        """Read the counters of all threads and of the machine."""
        self.stolen_ticks = _stolen_ticks() if self.stolen_ticks else 0
        self.pressure = _pressure() > PRESSURE
        counters = {thread: counters.split() for thread, counters in self._threads.read().items()}
        delayed = {thread: int(words[1]) for thread, words in counters.items() if len(words) > 1}
        self._samples.append(_Sample(perf_counter_ns(), delayed))

    def note(self, now: int, naps: int) -> None:
        """Note the counters for `stalled_ns`, before this thread sleeps again after that many naps."""
        self._thread, self._noted_at, self._slept = threading.get_ident(), now, _slept(naps)
        if now - self._others_at > OTHERS_NS:
            self._others_at, self._others = now, self._threads.read()
            self._own = self._others.pop(self._thread, b"")
        else:
            self._own = self._threads.of(self._thread)

    def stalled_ns(self, begin: int, end: int, naps: int) -> int:
        """Return about how long this thread, and any that it may wait for, did nothing in a gap that has just ended."""
        thread = threading.get_ident()
        if self._thread != thread or not self._own or _slept(naps) == self._slept:
            return 0
        awake = _between(self._own, self._threads.of(thread))
        others = max(
            (_between(counters, self._threads.of(other)) for other, counters in self._others.items()), default=0
        )
        # It was awake for an unknown part of the time from the note to the gap: assume a little.
        before = min(awake, MAX_BEFORE_NS, max(0, begin - self._noted_at) // 2)
        return max(0, end - begin - (awake - before) - others)

    def add_stall(self, at: int, length: int) -> bool:
        """Keep a stall; return True if there were so many of late that it is not reported by itself."""
        self._stalls.append((at, length))
        return len([one for one, _ in self._stalls if one > at - SUMMARY_NS]) >= FREQUENT

    def stalled(self, now: int) -> float:
        """Return the share of the last second in which it was stalled, if it was so again and again."""
        recent = [length for at, length in self._stalls if at > now - SUMMARY_NS]
        return min(1.0, sum(recent) / SUMMARY_NS) if len(recent) >= FREQUENT else 0.0

    def delayed(self, now: int) -> float:
        """Return the share of the last second in which its most delayed thread waited for a processor."""
        recent = [sample for sample in self._samples if sample.at > now - SUMMARY_NS]
        if len(recent) < 2:
            return 0.0
        first, last = recent[0].delayed, recent[-1].delayed
        most = max((last[thread] - first[thread] for thread in last.keys() & first.keys()), default=0)
        return most / max(1, recent[-1].at - recent[0].at)


class _Stall(NamedTuple):
    at: int
    stolen_ticks: int
    text: str


class StallDetector:
    """The stalls of one rank in one communicator."""

    def __init__(self, engine: ObservedEngine, process: ProcessMonitor, processor: CpuUsage) -> None:
        """Start without stalls."""
        self._engine, self._process, self._processor = engine, process, processor
        self._held: list[_Stall] = []

    def __bool__(self) -> bool:
        """Return True if a stall is held back."""
        return bool(self._held)

    def check(self, begin: int, now: int, naps: int) -> bool:
        """Examine a gap between polls of a blocked caller; return True if stalls are too frequent to report singly."""
        stalled = self._processor.stalled_ns(begin, now, naps)
        if stalled < STALL_NS:
            return False
        if self._processor.add_stall(now, stalled):
            return True
        if _is_excused(stalled):
            return False
        who = f"rank {self._process.rank} ({self._process.host})"
        where = "".join(f" in {wait.title}" for wait in self._engine.snapshot().waits)
        text = f"stall: {who} did not run for {stalled / 1e6:.1f} ms{where}"
        self._held.append(_Stall(now, self._processor.stolen_ticks, text))
        return False

    def flush(self, now: int) -> list[Diagnosis]:
        """Return the stalls that were held back long enough, and in which the machine was not paused."""
        ripe = [stall for stall in self._held if now - stall.at > HELD_NS]
        if not ripe:
            return []
        self._held = [stall for stall in self._held if now - stall.at <= HELD_NS]
        ticks = _stolen_ticks()
        return [Diagnosis(STALL, (self._process.rank,), stall.text) for stall in ripe if stall.stolen_ticks == ticks]


def _is_excused(length: int) -> bool:
    """Return True if a stall of this length does not count, because threads of the machine wait for processors."""
    return length <= MIN_STALL_NS and _pressure() > PRESSURE


def _stolen_ticks() -> int:
    """Return the time that a hypervisor has taken from this machine so far, in ticks of all processors."""
    try:
        with open("/proc/stat", "rb", buffering=0) as file:
            return int(file.read(160).split()[8])
    except (OSError, IndexError, ValueError):
        return 0


def _pressure() -> float:
    """Return the percentage of the last ten seconds in which some thread waited for a processor."""
    try:
        with open("/proc/pressure/cpu", "rb", buffering=0) as file:
            return float(file.read().split()[1].removeprefix(b"avg10="))
    except (OSError, IndexError, ValueError):
        return 0.0


def _awake(counters: bytes) -> int | None:
    """Return how long a thread has run or waited for a processor so far."""
    words = counters.split()
    return int(words[0]) + int(words[1]) if len(words) > 1 else None


def _between(before: bytes, after: bytes) -> int:
    start, end = _awake(before), _awake(after)
    return 0 if start is None or end is None else end - start


def _slept(naps: int) -> int:
    """Return how often this thread has gone to sleep so far, without its naps."""
    return getrusage(RUSAGE_THREAD).ru_nvcsw - naps if getrusage is not None else 0
