"""A thread that writes what the settings ask for once a second: rows, Prometheus' file, and its endpoint."""

from __future__ import annotations

import threading
from time import perf_counter_ns
from typing import TYPE_CHECKING

from mpi_gpucomp.monitor import prometheus
from mpi_gpucomp.monitor.csvfile import CsvFile, rows
from mpi_gpucomp.monitor.settings import fill

if TYPE_CHECKING:
    from mpi_gpucomp.monitor.station import Station

__all__ = ["Writer"]

SECONDS = 1.0


class Writer:
    """The thread, until it is closed."""

    def __init__(self, station: Station) -> None:
        """Start it."""
        chosen, rank = station.settings, station.rank
        self._station, self._box = station, station.box
        self._csv = CsvFile(fill(chosen.csv, rank)) if chosen.csv else None
        self._prometheus = fill(chosen.prometheus, rank) if chosen.prometheus else None
        if chosen.serve:  # each rank of a machine has a port of its own
            prometheus.serve(chosen.serve, lambda: [self._box], added=rank)
        self._written, self._end = perf_counter_ns(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpucomp-writer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(SECONDS):
            self._write()

    def _write(self) -> None:
        since, self._written = self._written, perf_counter_ns()
        self._station.recorder.collect()
        self._station.beat()
        if self._csv is not None:
            self._csv.add(rows(self._box, since))
        if self._prometheus is not None:
            prometheus.write(self._prometheus, [self._box])

    def close(self) -> None:
        """Write the rest, and end."""
        self._end.set()
        self._thread.join()
        self._write()
