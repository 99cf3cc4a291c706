"""The monitor of this process: one box, its alarms, and what is written besides; made by the first communicator."""

from __future__ import annotations

import atexit
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from mpi_gpucomp.monitor import settings
from mpi_gpucomp.monitor.alarms import Alarms
from mpi_gpucomp.monitor.box import SEND, Box, LinkState, State
from mpi_gpucomp.monitor.flight import Flight
from mpi_gpucomp.monitor.judge import ALARM_KINDS
from mpi_gpucomp.monitor.recorder import Recorder
from mpi_gpucomp.monitor.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.monitor.flight import Source
    from mpi_gpucomp.monitor.link import Link
    from mpi_gpucomp.monitor.recorder import Group
    from mpi_gpucomp.monitor.settings import MonitorSettings

__all__ = ["Station", "known", "station"]


class Station:
    """What all communicators of a process share."""

    def __init__(self, chosen: MonitorSettings, rank: int, size: int) -> None:
        """Be this rank of the world."""
        self.settings, self.rank, self.size, self.host = chosen, rank, size, settings.host_name()
        path = None
        if chosen.directory is not None:
            path = Path(chosen.directory) / settings.fill("%h.%p.%r.box", rank).name
        self.box = Box.make(chosen.records, path)
        self.box.begin(rank, size, self.host)
        self.recorder = Recorder(self.box)
        log = settings.fill(chosen.log, rank) if chosen.log else None
        self.alarms = Alarms(self.box, rank, log)
        self.sources: weakref.WeakSet[Source] = weakref.WeakSet()
        """The communicators that are in use, for flight records."""
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

    def links(self, only: Group | None = None) -> list[LinkState]:
        """Return the links of one communicator, or of all, those to one peer together, with what is under way."""
        waiting: dict[tuple[int, int], list[int]] = {}
        for source in list(self.sources):
            for one in source.chunks():
                if one.kind == SEND:
                    waiting.setdefault((one.peer, one.rail), []).append(one.nbytes)
        found: dict[tuple[int, int], list[Link]] = {}
        for group in [only] if only else self.recorder.groups:
            for key, link in list(group.tally.links.items()):
                found.setdefault(key, []).append(link)
        return [_together(links, waiting.get(key, [])) for key, links in found.items()]

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


def _together(links: Sequence[Link], waiting: Sequence[int]) -> LinkState:
    newest = max(links, key=lambda link: link.last)
    return LinkState(
        *(newest.peer, newest.rail, sum(link.count for link in links), sum(link.sent for link in links)),
        *(newest.recent, newest.before or newest.mean, sum(waiting), len(waiting)),
        any(link.is_slow(link.last) for link in links),
    )


_lock = threading.Lock()
_station: Station | None = None


def known() -> Station | None:
    """Return the monitor of this process, if there is one."""
    return _station


def station(chosen: MonitorSettings, rank: int, size: int) -> Station:
    """Return the monitor of this process; the first who asks says what it is like."""
    global _station
    with _lock:
        if _station is None:
            _station = Station(chosen, rank, size)
            atexit.register(_station.close)
        return _station
