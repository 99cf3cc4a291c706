"""Finds out when this rank stood still in a call.

A standstill is held for a moment, until Linux knows whether the whole machine stood still as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.monitor.diagnosis import STALL, Diagnosis
from mpi_gpucomp.monitor.processor import is_pressed, stolen

if TYPE_CHECKING:
    from mpi_gpucomp.engine.deadlock import DeadlockDetector
    from mpi_gpucomp.monitor.process_monitor import ProcessMonitor
    from mpi_gpucomp.monitor.processor import CpuUsage

__all__ = ["STALL_NS", "StallDetector"]

STALL_NS = 4_500_000
"""The shortest standstill that counts.

A process that is to stop for 5 ms on a busy machine may stand still for less: its threads need a processor to stop on.
"""
HELD_NS = 40_000_000
"""How long it takes Linux to count what a hypervisor has kept from the machine."""


class _Standstill(NamedTuple):
    at: int
    stolen: int
    text: str


class StallDetector:
    """Those of one rank."""

    def __init__(self, watch: DeadlockDetector, station: ProcessMonitor, processor: CpuUsage) -> None:
        """Start with none."""
        self._watch, self._station, self._processor = watch, station, processor
        self._held: list[_Standstill] = []

    def __bool__(self) -> bool:
        """Say whether there is one that is held."""
        return bool(self._held)

    def check(self, begin: int, now: int, naps: int) -> bool:
        """Judge a gap in which the caller waited and this thread did not turn; say if it is one of very many."""
        still = self._processor.stood_still(begin, now, naps)
        if still < STALL_NS:
            return False
        if self._processor.remember(now, still):
            return True
        if is_pressed(still):
            return False
        who = f"rank {self._station.rank} ({self._station.host})"
        where = "".join(f" in {title}" for title in self._watch.status().waits.values())
        text = f"stall: {who} stood still for {still / 1e6:.1f} ms{where}"
        self._held.append(_Standstill(now, self._processor.stolen, text))
        return False

    def settle(self, now: int) -> list[Diagnosis]:
        """Return those that were held for long enough, and in which nothing was kept from the machine."""
        ripe = [one for one in self._held if now - one.at > HELD_NS]
        if not ripe:
            return []
        self._held = [one for one in self._held if now - one.at <= HELD_NS]
        kept = stolen()
        return [Diagnosis(STALL, (self._station.rank,), one.text) for one in ripe if one.stolen == kept]
