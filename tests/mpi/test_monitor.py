"""The monitor in real runs: what it counts, what it leaves in a directory, and an alarm that it should raise."""

from __future__ import annotations

import re
from pathlib import Path

from launch import needs_mpirun, run

from mpi_gpucomp.monitor.chrome_trace import trace
from mpi_gpucomp.monitor.reader import newest
from mpi_gpucomp.trace import CALL, DECODE, ENCODE, RECV, SEND

pytestmark = needs_mpirun


def test_what_is_counted_is_what_was_sent_and_boxes_stay(tmp_path: Path) -> None:
    settings = {
        "MPI_GPUCOMP_MONITOR": str(tmp_path / "boxes"),
        "MPI_GPUCOMP_CSV": str(tmp_path / "%r.csv"),
        "MPI_GPUCOMP_PROMETHEUS": str(tmp_path / "%r.prom"),
    }
    ended = run(4, "tests/mpi/watched.py", "work", environment=settings)
    assert ended.returncode == 0 and ended.stdout.count("is content") == 4, ended.stderr
    boxes = newest(tmp_path / "boxes")
    assert [box.head.rank for box in boxes] == [0, 1, 2, 3]
    assert all(box.state.closed and box.state.begun == box.state.ended >= 4 for box in boxes)
    kinds = [set(box.records()["kind"].tolist()) for box in boxes]
    assert kinds == [
        {CALL, ENCODE, SEND},
        {CALL, ENCODE, RECV, SEND, DECODE},
        *[{CALL, RECV, SEND, DECODE}] * 1,
        {CALL, RECV, DECODE},
    ]
    assert {one["pid"] for one in trace(boxes)["traceEvents"]} == {0, 1, 2, 3}
    assert len((tmp_path / "0.csv").read_text().splitlines()) > 1
    sent = r'mpi_gpucomp_sent_bytes_total\{rank="0",host="[^"]+",to="1",rail="0"\} [1-9]'
    assert re.search(sent, (tmp_path / "0.prom").read_text())


def test_a_rank_that_always_comes_late_is_named_on_all_ranks() -> None:
    ended = run(4, "tests/mpi/watched.py", "late")
    assert ended.returncode == 0 and ended.stdout.count("is content") == 4, ended.stderr
    assert len(re.findall(r"rank 0: imbalance: rank 3 \(\S+\) joins calls late, others wait", ended.stderr)) == 1
