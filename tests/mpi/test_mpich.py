"""Collectives of a Communicator on MPICH, besides the MPI of the environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import run


@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_every_collective_matches_mpich(mpich: Path, ranks: int) -> None:
    done = run(ranks, "tests/mpi/compare_native.py", "6", mpich=mpich)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[0])
    assert found["wrong"] == []
    assert found["mpi"].startswith("MPICH") and found["compared"] > 1000
    assert "pending" not in done.stdout + done.stderr  # MPICH reports at exit what was not freed
