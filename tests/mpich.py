"""The fixture `mpich`: an MPICH installed for the tests, beside the MPI of the environment."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import run

INSTALL = ["-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed"]


@pytest.fixture(scope="session")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the prefix of an MPICH that mpi4py can load, or skip with the reason."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    place = shared / "mpich"
    with (shared / "mpich.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pytest-xdist's workers share one installation
        if not place.exists():
            _install(place)
    _try(place)
    return place


@pytest.fixture(params=["default", "mpich"])
def any_mpi(request: pytest.FixtureRequest) -> Path | None:
    """Return what `launch.run` takes as `mpich`: None for the MPI of the environment, then the prefix of an MPICH."""
    return request.getfixturevalue("mpich") if request.param == "mpich" else None


def _install(place: Path) -> None:
    command = [sys.executable, *INSTALL, "--prefix", str(place), "mpich>=4.3"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    except subprocess.SubprocessError as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        pytest.skip(f"pip cannot install MPICH: {lines[-1] if lines else error}")


def _try(place: Path) -> None:
    """Skip if mpi4py was built for one MPI, as it is when built from source."""
    done = run(1, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())", mpich=place)
    if not done.stdout.startswith("MPICH"):
        lines = done.stderr.strip().splitlines() or [f"it loads {done.stdout.partition(',')[0]!r}"]
        pytest.skip(f"this mpi4py cannot load MPICH: {lines[-1]}")
