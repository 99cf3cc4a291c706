"""Whether this process gets to run: how long its threads waited for a processor, and whether it stood still without.

Linux counts for each thread how long it ran, and how long it could run and was not let to. A process that was stopped,
or sat in a device or a page fault, did neither: that tells a standstill from a busy machine. All of Python's threads
count, as each may have to wait for what another one holds. Linux also counts how often a thread went to sleep: more
than it meant to, if it was stopped; not if the whole machine was paused by its hypervisor, unless threads got into each
other's way just then. What a hypervisor takes is counted too, though coarsely.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from time import perf_counter_ns
from typing import NamedTuple

try:
    from resource import RUSAGE_THREAD, getrusage
except ImportError:  # not Linux, which has no such counts of threads either
    getrusage = None  # type: ignore[assignment]

from mpi_gpucomp.monitor.diagnosis import LOOKED_AT_NS

__all__ = ["OFTEN", "CpuUsage", "ThreadCounters", "is_pressed", "stolen"]

SAMPLES = 16
OFTEN = 5
"""Standstills in a second from which on they are not told one by one."""
PRESSED, PRESSED_LEAST_NS = 60.0, 100_000_000
"""Where threads of the machine wait for processors more than this percentage of the time, only so long a one counts."""
MOST_BEFORE_NS = 1_500_000
"""How long a thread is taken to have run between its last note and a standstill, at most."""
OTHERS_NS = 8_000_000
"""How often the other threads are noted, by whoever waits."""


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
                self._renew_at = perf_counter_ns() + LOOKED_AT_NS
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


def _awake(counts: bytes) -> int | None:
    """Return how long a thread has run or waited for a processor so far."""
    words = counts.split()
    return int(words[0]) + int(words[1]) if len(words) > 1 else None


def _between(before: bytes, after: bytes) -> int:
    start, end = _awake(before), _awake(after)
    return 0 if start is None or end is None else end - start


def is_pressed(still: int) -> bool:
    """Say whether a standstill may come from a machine on which some thread has waited for a processor for seconds."""
    return still <= PRESSED_LEAST_NS and _pressure() > PRESSED


def _pressure() -> float:
    """Return in how much of the last ten seconds some thread waited for a processor, in percent."""
    try:
        with open("/proc/pressure/cpu", "rb", buffering=0) as file:
            return float(file.read().split()[1].removeprefix(b"avg10="))
    except (OSError, IndexError, ValueError):
        return 0.0


def stolen() -> int:
    """Return for how long a hypervisor has kept processors from this machine so far, in ticks of all together."""
    try:
        with open("/proc/stat", "rb", buffering=0) as file:
            return int(file.read(160).split()[8])
    except (OSError, IndexError, ValueError):
        return 0


def _slept(naps: int) -> int:
    """Return how often this thread has gone to sleep so far, without the naps that it was told to take."""
    return getrusage(RUSAGE_THREAD).ru_nvcsw - naps if getrusage is not None else 0


class CpuUsage:
    """What is known of the threads of this process."""

    def __init__(self, threads: ThreadCounters) -> None:
        """Start with no samples."""
        self._files = threads
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES)
        # What was written down before a rest; the numbers are read only if something is wrong.
        self._thread = self._noted_at = self._slept = self._others_at = 0
        self._own, self._others = b"", dict[int, bytes]()
        self.stolen = stolen()
        """At the last sample; it is not asked for where there is no hypervisor that takes any."""
        self.pressed = False
        """Whether the machine was short of processors then."""
        self._stood: deque[tuple[int, int]] = deque(maxlen=128)

    def sample(self) -> None:
        """Look at all threads, and at the machine, from time to time."""
        self.stolen = stolen() if self.stolen else 0
        self.pressed = _pressure() > PRESSED
        counts = {thread: counts.split() for thread, counts in self._files.read().items()}
        delayed = {thread: int(words[1]) for thread, words in counts.items() if len(words) > 1}
        self._samples.append(_Sample(perf_counter_ns(), delayed))

    def note(self, now: int, naps: int) -> None:
        """Write down where the counts are, for `stood_still`, before this thread naps again after so many naps."""
        self._thread, self._noted_at, self._slept = threading.get_ident(), now, _slept(naps)
        if now - self._others_at > OTHERS_NS:
            self._others_at, self._others = now, self._files.read()
            self._own = self._others.pop(self._thread, b"")
        else:
            self._own = self._files.of(self._thread)

    def stood_still(self, begin: int, end: int, naps: int) -> int:
        """Return for about how long of a gap that has just ended this thread, and any that it may need, did nothing."""
        thread = threading.get_ident()
        if self._thread != thread or not self._own or _slept(naps) == self._slept:
            return 0
        awake = _between(self._own, self._files.of(thread))
        others = max((_between(counts, self._files.of(other)) for other, counts in self._others.items()), default=0)
        # It was awake for some of the time from the note to the gap, nobody knows how much: no more than a little.
        before = min(awake, MOST_BEFORE_NS, max(0, begin - self._noted_at) // 2)
        return max(0, end - begin - (awake - before) - others)

    def remember(self, at: int, still: int) -> bool:
        """Keep a standstill for `still`; say whether there were so many of late that one more is no news."""
        self._stood.append((at, still))
        return len([one for one, _ in self._stood if one > at - LOOKED_AT_NS]) >= OFTEN

    def still(self, now: int) -> float:
        """Return the share of the last second in which it stood still, if it did so again and again."""
        recent = [length for at, length in self._stood if at > now - LOOKED_AT_NS]
        return min(1.0, sum(recent) / LOOKED_AT_NS) if len(recent) >= OFTEN else 0.0

    def delayed(self, now: int) -> float:
        """Return the share of the last second in which one of its threads waited for a processor; of the worst one."""
        recent = [sample for sample in self._samples if sample.at > now - LOOKED_AT_NS]
        if len(recent) < 2:
            return 0.0
        first, last = recent[0].delayed, recent[-1].delayed
        most = max((last[thread] - first[thread] for thread in last.keys() & first.keys()), default=0)
        return most / max(1, recent[-1].at - recent[0].at)
