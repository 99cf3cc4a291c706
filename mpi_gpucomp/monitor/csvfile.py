"""Rows of comma-separated values: how each link did since the last row, in files that take turns."""

from __future__ import annotations

import csv
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.monitor.box import SEND

if TYPE_CHECKING:
    from pathlib import Path

    from mpi_gpucomp.monitor.box import Box

__all__ = ["HEADER", "CsvFile", "rows"]

HEADER = ("time", "group", "from", "to", "rail", "collective", "count", "bandwidth", "in_flight", "waiting")
MOST_BYTES, FILES = 8 << 20, 4


def rows(box: Box, since: int) -> list[list[Any]]:
    """Return a row for each link that has sent something since a time of the box's clock."""
    sent = box.records(since)
    sent = sent[sent["kind"] == SEND]
    names, own, found = box.names, box.head.rank, []
    states = {(link.peer, link.rail): link for link in box.links}
    for group, peer, rail in sorted(set(sent[["group", "peer", "rail"]].tolist())):
        some = sent[(sent["group"] == group) & (sent["peer"] == peer) & (sent["rail"] == rail)]
        state = states.get((peer, rail))
        last = some[np.argmax(some["complete"])]
        speed, in_flight, waiting = (state.speed, state.in_flight, state.waiting) if state else (0.0, 0, 0)
        who = [group, own, peer, rail, names[last["name"]]]
        found.append([f"{time.time():.3f}", *who, len(some), round(speed), in_flight, waiting])
    return found


class CsvFile:
    """A file that is put aside when it is full; the oldest go."""

    def __init__(self, path: Path, most: int = MOST_BYTES, files: int = FILES) -> None:
        """Keep so many files of so many bytes."""
        self._path, self._most, self._files = path, most, files
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, found: list[list[Any]]) -> None:
        """Add rows."""
        if not found:
            return
        if self._path.exists() and self._path.stat().st_size > self._most:
            self._rotate()
        fresh = not self._path.exists()
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([HEADER, *found] if fresh else found)

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path if number == 1 else self._path.with_name(f"{self._path.name}.{number - 1}")
            if newer.exists():
                newer.replace(older)
