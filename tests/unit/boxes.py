"""Boxes of several ranks in the middle of a broadcast along a chain, made by the recorder itself."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter_ns
from unittest.mock import patch

from mpi_gpucomp.monitor.diagnosis import Diagnosis
from mpi_gpucomp.monitor.process_monitor import ProcessMonitor
from mpi_gpucomp.monitor.settings import MonitorSettings
from mpi_gpucomp.trace import DECODE, ENCODE

MS = 1_000_000


def chain(directory: Path, ranks: int = 3, chunks: int = 40) -> list[ProcessMonitor]:
    """Return the monitors of ranks that have sent `chunks` of 1 MB to the next one, 2 ms each, in the last second."""
    made = [_rank(directory, rank, ranks, chunks) for rank in range(ranks)]
    made[0].alarms.add(Diagnosis("slow link", (1, 2), "slow link: from rank 1 <b> to rank 2"), loud=False)
    made[0].beat()
    return made


def _rank(directory: Path, rank: int, ranks: int, chunks: int) -> ProcessMonitor:
    station = ProcessMonitor(MonitorSettings(directory=str(directory)), rank, ranks)
    station.host = f"h{rank}"
    station.set_clock(rank * 5 * MS, 1000)
    group, now = station.recorder.communicator(range(ranks), rank), perf_counter_ns() - 100 * MS
    with patch("mpi_gpucomp.monitor.recorder.perf_counter_ns", lambda: now):
        log = group.begin("broadcast", "a broadcast")
        log.start()
        for chunk in range(chunks):
            before, now = now, now + 2 * MS
            if rank == 0:
                log.coded(ENCODE, before, 1_000_000, 2_000_000, 0, chunk)
            else:
                log.received(rank - 1, before, before + MS, 1_000_000, 0, chunk, 0)
                log.coded(DECODE, before, 1_000_000, 2_000_000, 0, chunk)
            if rank < ranks - 1:
                log.sent(rank + 1, before, 1_000_000, 0, chunk, 0)
        log.end(failed=False)
    station.recorder.collect()
    station.beat()
    return station
