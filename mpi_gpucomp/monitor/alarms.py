"""Alarms: raised once, kept while they last, and taken back; told to Python's logging, the box and a file."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpi_gpucomp.monitor.judge import HANG, STALL

if TYPE_CHECKING:
    from pathlib import Path

    from mpi_gpucomp.monitor.box import Box
    from mpi_gpucomp.monitor.judge import Verdict

__all__ = ["LOGGER", "Alarm", "Alarms"]

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

    def __init__(self, box: Box, rank: int, log: Path | None = None) -> None:
        """Keep them in a box, and add them to a file if there is one."""
        self._box, self._rank, self._log = box, rank, log
        self.all: list[Alarm] = []
        self._lasting: dict[tuple[str, tuple[int, ...]], tuple[Alarm, float]] = {}
        self.counts: dict[str, int] = {}

    def has(self, verdict: Verdict) -> bool:
        """Say whether this is known, and note that it lasts."""
        known = self._lasting.get((verdict.kind, verdict.ranks))
        if known is not None:
            self._lasting[verdict.kind, verdict.ranks] = known[0], time.monotonic()
        return known is not None

    def add(self, verdict: Verdict, *, loud: bool = True) -> Alarm | None:
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
