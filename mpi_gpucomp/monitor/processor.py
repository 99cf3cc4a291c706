"""Whether this process gets to run: how long its threads waited for a processor, and whether it stood still without.

Linux counts for each thread how long it could run and was not let to. A process that was stopped, or sat in a device or
a page fault, did not wait for a processor either, and did not use one: that tells a standstill from a busy machine. All
of Python's threads count, as each may have to wait for what another one holds.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from time import perf_counter_ns, thread_time_ns
from typing import NamedTuple

from mpi_gpucomp.monitor.digest import LOOKED_AT_NS

__all__ = ["Processor", "is_pressed"]

SAMPLES = 128
COUNTS_AS = 0.5
"""The share of a gap that must be spent off the processor, and not waiting for one, for it to be a standstill."""


OFTEN = 3
"""Standstills in a second from which on they are not told one by one."""
PRESSED, PRESSED_LEAST_NS = 25.0, 100_000_000
"""Where threads of the machine wait for processors more than this percentage of the time, only such a gap counts."""


class _Sample(NamedTuple):
    at: int
    thread: int
    used: int
    """By the thread that took the sample."""
    delayed: dict[int, int]


class _Files:
    """Linux's counts of Python's threads, kept open."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}
        self._renew_at = 0

    def read(self) -> dict[int, int]:
        """Return the nanoseconds that each thread has waited for a processor."""
        if perf_counter_ns() > self._renew_at:
            self._renew_at = perf_counter_ns() + LOOKED_AT_NS
            self._renew({thread.native_id for thread in threading.enumerate() if thread.native_id is not None})
        found = {}
        for thread, file in self._open.items():
            try:
                found[thread] = int(os.pread(file, 80, 0).split()[1])
            except (OSError, IndexError, ValueError):
                continue
        return found

    def _renew(self, alive: set[int]) -> None:
        for thread in self._open.keys() - alive:
            os.close(self._open.pop(thread))
        for thread in alive - self._open.keys():
            try:
                self._open[thread] = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue

    def __del__(self) -> None:
        for file in self._open.values():
            os.close(file)


def is_pressed(gap: int) -> bool:
    """Say whether a gap may come from a machine on which some thread has waited for a processor for seconds."""
    if gap > PRESSED_LEAST_NS:
        return False
    try:
        with open("/proc/pressure/cpu", "rb", buffering=0) as file:
            return float(file.read().split()[1].removeprefix(b"avg10=")) > PRESSED
    except (OSError, IndexError, ValueError):
        return False


class Processor:
    """What is known of the threads of this process."""

    def __init__(self) -> None:
        """Start with no samples."""
        self._files = _Files()
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES)
        self._stood: deque[tuple[int, int]] = deque(maxlen=SAMPLES)

    def sample(self) -> _Sample:
        """Look at all threads now."""
        sample = _Sample(perf_counter_ns(), threading.get_ident(), thread_time_ns(), self._files.read())
        self._samples.append(sample)
        return sample

    def stood_still(self, gap: int) -> int:
        """Return how long of a gap that has just ended no thread ran or waited for a processor."""
        if not self._samples or self._samples[-1].thread != threading.get_ident():
            return 0
        before, now = self._samples[-1], self.sample()
        delayed = sum(count - before.delayed.get(thread, count) for thread, count in now.delayed.items())
        still = gap - (now.used - before.used) - delayed
        if still < COUNTS_AS * gap:
            return 0
        self._stood.append((now.at, still))
        return still

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
