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


REMEDY = "Pass the same count, type, root, codec, chunk and algorithm on every rank."


def test_ranks_that_disagree_all_hear_who_said_what():
    done = run(3, "tests/mpi/disagreeing.py")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert not [line for line in lines if line.endswith("no error")]
    for rank in range(3):
        said = [line.removeprefix(f"{rank}: ") for line in lines if line.startswith(f"{rank}: ")]
        usual = "1000 x float32, root 0, replace, split, chain, chunks of 262144"
        other = "1001 x float32, root 0, replace, split, chain, chunks of 262144"
        assert said[0] == (
            f"count: AgreementError: rank {rank}: broadcast: expected the same call on every rank, "
            f"got ranks 0, 2: {usual}; rank 1: {other}. {REMEDY}"
        )
        assert "float64, root 0, sum, split, ring" in said[1] and "root 1" in said[2]
        assert "rank 1: 1000 x float32, root 0, replace, mpc, chain" in said[3] and "tree" in said[4]
        assert "rank 1: an error: codec split: expected elements of type" in said[5]
        assert said[6] == "still usable: 2000"
