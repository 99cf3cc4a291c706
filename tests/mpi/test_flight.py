"""Flight records of real hangs, and the cause that `blame` names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import LAUNCHER, ROOT, needs_mpirun, run

from mpi_gpucomp.monitor.flight import blame, read

pytestmark = needs_mpirun
HAS_ULFM = LAUNCHER is not None and LAUNCHER.mpi == "openmpi"


def hang(directory: Path, case: str, victim: int) -> subprocess.CompletedProcess[str]:
    settings = {"MPI_GPUCOMP_FLIGHT": str(directory), "MPI_GPUCOMP_HANG": "1"}
    return run(4, "tests/mpi/flight_records.py", case, str(victim), environment=settings)


@pytest.mark.parametrize(("victim", "others"), [(0, "1, 2, 3"), (2, "0, 1, 3")])
def test_rank_that_does_not_join(tmp_path: Path, victim: int, others: str) -> None:
    ended = hang(tmp_path, "late", victim)
    assert ended.returncode == 0 and ended.stdout.count("has completed") == 4, ended.stderr
    found = blame(read(tmp_path))
    assert found.ranks == (victim,)
    assert re.fullmatch(
        rf"rank {victim} \(\S+\) is behind it: it has begun 1 of 2 calls, ranks {others} wait in broadcast \(call 2\);"
        r" it is at flight_records.py:\d+ in stay_away.",
        found.text,
    )
    alarm = rf"hang: rank {victim} \(\S+\) has begun 1 of 2 calls, others wait in broadcast \(call 2\), no progress"
    assert len(re.findall(rf"rank \d: {alarm} for 1 s\n", ended.stderr)) == 1, ended.stderr


def test_rank_that_others_wait_for_within_mpi(tmp_path: Path) -> None:
    ended = hang(tmp_path, "late-mpi", 1)
    assert ended.returncode == 0 and ended.stdout.count("has completed") == 4, ended.stderr
    found = blame(read(tmp_path))
    assert found.ranks == (1,)
    assert re.search(r"ranks 0, 2, 3 wait in native MPI Barrier \(call \d\); it is at flight_records.py", found.text)


def test_signal_writes_a_record_also_within_mpi(tmp_path: Path) -> None:
    ended = hang(tmp_path, "asked", 3)
    assert ended.returncode == 0 and ended.stdout.count("has completed") == 4, ended.stderr
    records = [json.loads(path.read_text()) for path in tmp_path.glob("flight.*.json")]
    asked = {record["rank"]: record for record in records if record["reason"] == "SIGUSR1"}
    assert sorted(asked) == [0, 1, 2]
    assert all(any("flight_records.py" in frame for frame in asked[0]["threads"]["MainThread"]) for _ in asked)
    assert {one["kind"] for one in asked[0]["operations"]} >= {"send", "encode", "call"}


@pytest.mark.skipif(not HAS_ULFM, reason="only Open MPI tolerates failed ranks: --with-ft ulfm")
def test_dead_rank_leaves_no_record(tmp_path: Path) -> None:
    assert LAUNCHER is not None
    command = LAUNCHER.command(4, [sys.executable, "tests/mpi/flight_records.py", "dead", "2"], ("--with-ft", "ulfm"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPI_GPUCOMP_FLIGHT": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment, check=False)
    assert ended.stdout.count("got the error") == 3, ended.stderr
    found = blame(read(tmp_path))
    assert found.ranks == (2,)
    assert found.text.startswith("rank 2 is behind it: it left no record (dead or stopped), and rank")
    assert found.text.endswith(" in broadcast (call 4).")
