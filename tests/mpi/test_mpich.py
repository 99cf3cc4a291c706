"""Collectives of a Communicator on MPICH, whatever MPI the other tests run on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import run


@pytest.mark.parametrize("ranks", [2, 5])
def test_collectives_give_what_mpich_gives(mpich: Path, ranks: int) -> None:
    done = run(ranks, "tests/mpi/against_mpi.py", "6", mpich=mpich)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[0])
    assert found["wrong"] == []
    assert found["mpi"].startswith("MPICH") and found["compared"] > 1000
    assert "pending" not in done.stdout + done.stderr  # MPICH tells at its end what was not freed
