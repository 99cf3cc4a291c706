"""Traces of several ranks in a broadcast along a chain, made by the recorder."""

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
    made[0].alarms.add(Diagnosis("slow link", (1, 2), "slow link: from rank 1 <b> to rank 2"), logged=False)
    made[0].write_state()
    return made


def _rank(directory: Path, rank: int, ranks: int, chunks: int) -> ProcessMonitor:
    monitor = ProcessMonitor(MonitorSettings(directory=str(directory)), rank, ranks)
    monitor.host = f"h{rank}"
    monitor.set_clock(rank * 5 * MS, 1000)
    trace, now = monitor.recorder.communicator(range(ranks), rank), perf_counter_ns() - 100 * MS
    with patch("mpi_gpucomp.monitor.recorder.perf_counter_ns", lambda: now):
        call = trace.begin("broadcast", "a broadcast")
        call.start()
        for chunk in range(chunks):
            before, now = now, now + 2 * MS
            if rank == 0:
                call.coded(ENCODE, before, 1_000_000, 2_000_000, 0, chunk)
            else:
                call.received(rank - 1, before, before + MS, 1_000_000, 0, chunk, 0)
                call.coded(DECODE, before, 1_000_000, 2_000_000, 0, chunk)
            if rank < ranks - 1:
                call.sent(rank + 1, before, 1_000_000, 0, chunk, 0)
        call.end(failed=False)
    monitor.recorder.collect()
    monitor.write_state()
    return monitor
