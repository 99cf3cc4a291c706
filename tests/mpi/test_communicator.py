"""Collectives of a Communicator under mpirun."""

from __future__ import annotations

import json

import pytest
from launch import needs_mpirun, run

pytestmark = needs_mpirun


@pytest.mark.parametrize(("ranks", "step"), [(1, 1), (2, 2), (4, 3), (5, 4)])
def test_every_collective_gives_what_mpi_gives(ranks, step):
    done = run(ranks, "tests/mpi/against_mpi.py", str(step))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["compared"] > 2000


def test_collectives_go_on_without_a_thread_of_their_own():
    environment = {"MPI4PY_RC_THREAD_LEVEL": "serialized"}
    done = run(2, "tests/mpi/against_mpi.py", "5", environment=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["wrong"] == []


SAME = "Pass the same count, type, root, operation, codec, chunk and algorithm on every rank."
ODD = {
    "count": "1001 x float32, root 0, replace, split",
    "dtype": "1000 x float64, root 0, sum, split",
    "root": "1000 x float32, root 1, replace, split",
    "operation": "1000 x float32, root 0, max, split",
    "codec": "1000 x float32, root 0, replace, mpc",
    "algorithm": "1000 x float32, root 0, replace, split, tree, chunks of 131072",
    "collective": "1000 x float32, root 0, replace, split",
    "named": "1000 x float32, root 0, sum, split, ring, chunks of 10000",
    "started": "1001 x float32, root 0, replace, split, ring, chunks of 131072",
}
"""What rank 1 says in each case."""


def test_ranks_that_disagree_all_hear_who_said_what():
    done = run(3, "tests/mpi/disagreeing.py")
    assert done.returncode == 0, done.stderr
    everybody = json.loads(done.stdout)
    for rank, told in enumerate(everybody):
        assert told["usable"]
        assert told["count 1000"] == (
            f"AgreementError: rank {rank}: Bcast (call 1): expected the same call on every rank, got ranks 0, 2: "
            "1000 x float32, root 0, replace, split, by MPI's own; "
            f"rank 1: 1001 x float32, root 0, replace, split, by MPI's own. {SAME}"
        )
        for name, said in ODD.items():
            assert told[f"{name} 1000"].startswith(f"AgreementError: rank {rank}: ")
            assert f"; rank 1: {said}" in told[f"{name} 1000"] and told[f"{name} 1000"].endswith(SAME)
            assert f"; rank 1: {said.replace('100', '5000', 1)[:4]}" in told[f"{name} 50000"]
            assert told[f"{name} 50000"].startswith(f"AgreementError: rank {rank}: ")
        refused = "codec split: expected elements of type float16 or bfloat16 or float32 or float64, got int32."
        for count in (1000, 50_000):
            heard = told[f"refused {count}"]
            assert refused in heard and heard.startswith("BufferError" if rank == 1 else "AgreementError")


DEADLOCK = "expected every rank to join what the others wait for, got"
REMEDY = "Start collectives before waiting for others, or wait for them in the same order on every rank."


def test_ranks_that_wait_for_each_other_in_a_circle_all_hear_who_waits_for_what():
    done = run(3, "tests/mpi/stuck.py", "circle")
    assert done.returncode == 0, done.stderr
    who = (
        "rank 0 waits for allreduce 'A', which rank 1 has not joined; "
        "rank 1 waits for allreduce 'B', which ranks 0, 2 have not joined; "
        "rank 2 waits for allreduce 'A', which rank 1 has not joined"
    )
    assert json.loads(done.stdout) == [
        [f"DeadlockError: rank {rank}: collectives: {DEADLOCK} {who}. {REMEDY}", True] for rank in range(3)
    ]


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever():
    done = run(3, "tests/mpi/stuck.py", "absent")
    assert done.returncode == 0, done.stderr
    for rank, (heard, usable) in enumerate(json.loads(done.stdout)):
        assert heard.startswith(f"DeadlockError: rank {rank}: collectives: {DEADLOCK} ")
        assert "rank 0 waits for broadcast (call 1), which rank 1 has not joined" in heard
        assert "rank 1 waits for nothing here" in heard
        assert usable


def test_ranks_that_are_stuck_inside_mpi_are_ended_with_the_reason():
    done = run(3, "tests/mpi/stuck.py", "mixed")
    assert done.returncode != 0
    assert (
        f"collectives: {DEADLOCK} rank 0 waits for Allreduce of MPI's own (number 2), which rank 1 has not joined; "
        in (done.stderr)
    )
    assert "rank 1 waits for allreduce (call 2), which ranks 0, 2 have not joined" in done.stderr
