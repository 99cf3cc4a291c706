"""Gloo, and compression per message: right results on two MPIs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT, needs_mpirun, run

MPIS = ("Open MPI", "MPICH")


@pytest.fixture(params=MPIS)
def library(request: pytest.FixtureRequest) -> Path | None:
    """Return where the second MPI is, or None for the one that the environment has."""
    found: Path | None = request.getfixturevalue("mpich") if request.param == "MPICH" else None
    return found


def findings(*arguments: str, mpich: Path | None, ranks: int = 3) -> dict[str, Any]:
    done = run(ranks, "-W", "error", *arguments, mpich=mpich)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr and "pending" not in done.stderr + done.stdout
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
    return found


@needs_mpirun
def test_gloo_gives_what_it_should(library: Path | None) -> None:
    pytest.importorskip("torch")
    found = findings("tests/bench/baseline_ranks.py", "gloo", mpich=library)
    assert found["wrong"] == []
    assert found["compared"] > 150


@needs_mpirun
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_compression_per_message_gives_what_it_should(ranks: int) -> None:
    found = findings("tests/bench/baseline_ranks.py", "messages", mpich=None, ranks=ranks)
    assert found["wrong"] == []
    assert found["compared"] > 90


def test_compression_per_message_on_mpich(mpich: Path) -> None:
    found = findings("tests/bench/baseline_ranks.py", "messages", mpich=mpich)
    assert found["wrong"] == [] and found["mpi"].startswith("MPICH")


def test_without_torch_there_is_no_gloo() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from mpi4py import MPI\n"
        "from osu_bench.suite.baselines import Gloo\n"
        "try: Gloo(MPI.COMM_SELF)\n"
        "except RuntimeError as error: print(error)"
    )
    assert said_by(program) == (
        "gloo: expected torch, got import of torch halted; None in sys.modules. "
        'Install it: pip install "mpi_gpucomp[torch]".'
    )


def test_an_interface_that_gloo_cannot_take() -> None:
    program = (
        "import os; os.environ['GLOO_SOCKET_IFNAME'] = 'nosuch0'\n"
        "from osu_bench.suite import baselines\n"
        "try: baselines.own_address()\n"
        "except ValueError as error: print(error)"
    )
    assert said_by(program) == (
        "environment variable GLOO_SOCKET_IFNAME: expected an interface with an address, "
        "got 'nosuch0': No such device. `ip address` lists those of this host."
    )


def test_the_address_of_an_interface() -> None:
    program = (
        "import os; os.environ['GLOO_SOCKET_IFNAME'] = 'lo,eth0'\n"
        "from osu_bench.suite import baselines\n"
        "print(baselines.own_address())"
    )
    assert said_by(program) == "127.0.0.1"


def said_by(program: str) -> str:
    """Run a program alone, and return its one line."""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    return done.stdout.strip()
