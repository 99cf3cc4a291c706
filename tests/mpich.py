"""The fixture `mpich`: a second MPI, beside the one that the environment has."""

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
    """Return where an MPICH is that mpi4py can use in place of the other MPI, or skip and say why."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    place = shared / "mpich"
    with (shared / "mpich.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of pytest-xdist share one
        if not place.exists():
            _install(place)
    _try(place)
    return place


@pytest.fixture(params=["default", "mpich"])
def any_mpi(request: pytest.FixtureRequest) -> Path | None:
    """Return what `launch.run` takes as `mpich`: None for the MPI of the environment, then the place of an MPICH."""
    return request.getfixturevalue("mpich") if request.param == "mpich" else None


def _install(place: Path) -> None:
    command = [sys.executable, *INSTALL, "--prefix", str(place), "mpich>=4.3"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        pytest.skip(f"no MPICH to be had from pip: {said[-1] if said else error}")


def _try(place: Path) -> None:
    """Skip where mpi4py was built for one MPI alone, as it is from source."""
    done = run(1, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())", mpich=place)
    if not done.stdout.startswith("MPICH"):
        said = done.stderr.strip().splitlines() or [f"it runs {done.stdout.partition(',')[0]!r}"]
        pytest.skip(f"this mpi4py does not take MPICH: {said[-1]}")
