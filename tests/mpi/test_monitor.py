"""The monitor in real runs: its counters, its traces, and an alarm."""

from __future__ import annotations

import re
from pathlib import Path

from launch import needs_mpirun, run

from mpi_gpucomp.monitor.exporters import chrome_trace
from mpi_gpucomp.monitor.trace_buffer import newest
from mpi_gpucomp.trace import CALL, DECODE, ENCODE, RECV, SEND

pytestmark = needs_mpirun


def test_counters_match_the_transport_and_traces_remain(tmp_path: Path) -> None:
    settings = {
        "MPI_GPUCOMP_MONITOR": str(tmp_path / "traces"),
        "MPI_GPUCOMP_CSV": str(tmp_path / "%r.csv"),
        "MPI_GPUCOMP_PROMETHEUS": str(tmp_path / "%r.prom"),
    }
    ended = run(4, "tests/mpi/watched.py", "work", environment=settings)
    assert ended.returncode == 0 and ended.stdout.count("has completed") == 4, ended.stderr
    traces = newest(tmp_path / "traces")
    assert [buffer.header.rank for buffer in traces] == [0, 1, 2, 3]
    assert all(buffer.state.closed and buffer.state.begun == buffer.state.ended >= 4 for buffer in traces)
    kinds = [set(buffer.records()["kind"].tolist()) for buffer in traces]
    assert kinds == [
        {CALL, ENCODE, SEND},
        {CALL, ENCODE, RECV, SEND, DECODE},
        *[{CALL, RECV, SEND, DECODE}] * 1,
        {CALL, RECV, DECODE},
    ]
    assert {one["pid"] for one in chrome_trace(traces)["traceEvents"]} == {0, 1, 2, 3}
    assert len((tmp_path / "0.csv").read_text().splitlines()) > 1
    sent = r'mpi_gpucomp_sent_bytes_total\{rank="0",host="[^"]+",to="1",rail="0"\} [1-9]'
    assert re.search(sent, (tmp_path / "0.prom").read_text())


def test_a_rank_that_always_comes_late_is_named_on_all_ranks() -> None:
    ended = run(4, "tests/mpi/watched.py", "late")
    assert ended.returncode == 0 and ended.stdout.count("has completed") == 4, ended.stderr
    assert len(re.findall(r"rank 0: imbalance: rank 3 \(\S+\) joins calls late, others wait", ended.stderr)) == 1
