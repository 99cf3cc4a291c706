"""Collectives of a Communicator under mpirun."""

from __future__ import annotations

import pytest
from launch import needs_mpirun, run

pytestmark = needs_mpirun


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_every_collective_gives_what_mpi_gives(ranks):
    done = run(ranks, "tests/mpi/against_mpi.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:-1]) == [f"rank {n} of {ranks}: all as MPI has it" for n in range(ranks)]
