"""Detection of stalls: gaps in which a rank that was blocked in a call did not run.

A stall is held back for a moment, until Linux has counted whether the whole machine was paused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.monitor.diagnosis import STALL, Diagnosis
from mpi_gpucomp.monitor.processor import is_excused, stolen_ticks

if TYPE_CHECKING:
    from mpi_gpucomp.monitor.process_monitor import ProcessMonitor
    from mpi_gpucomp.monitor.processor import CpuUsage
    from mpi_gpucomp.trace import ObservedEngine

__all__ = ["STALL_NS", "StallDetector"]

STALL_NS = 4_500_000
"""The shortest stall that counts.

A process that is stopped for 5 ms on a busy machine may stall for less: its threads need a processor to stop on.
"""
HELD_NS = 40_000_000
"""Nanoseconds until Linux has counted the time that a hypervisor took from the machine."""


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
        if is_excused(stalled):
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
        ticks = stolen_ticks()
        return [Diagnosis(STALL, (self._process.rank,), stall.text) for stall in ripe if stall.stolen_ticks == ticks]
