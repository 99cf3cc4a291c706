"""PyTorch's distributed tests against the backend: those listed in conformance.txt; conformance.py runs all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launch import LAUNCHER, ROOT, needs_mpirun

from osu_bench.launcher import OPEN_MPI

HERE = Path(__file__).parent


@pytest.mark.slow
@needs_mpirun
def test_pytorch_tests_pass_as_gloo_and_mpi() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("expecttest", reason="PyTorch's tests need expecttest")
    if LAUNCHER is None or LAUNCHER.mpi != OPEN_MPI:
        pytest.skip("needs Open MPI's mpirun")
    command = [
        sys.executable,
        str(HERE / "conformance.py"),
        "--backends",
        "gloo,mpi",
        "--list",
        str(HERE / "conformance.txt"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = len((HERE / "conformance.txt").read_text().split())
    assert done.stdout.splitlines()[-1] == f"{listed} distinct tests passed, 0 failed or hung"
