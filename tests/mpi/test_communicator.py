"""Collectives of a Communicator under mpirun."""

from __future__ import annotations

import json
from itertools import product

import pytest
from launch import needs_mpirun, run

pytestmark = needs_mpirun


@pytest.mark.parametrize(
    ("ranks", "step"),
    [
        (1, 1),
        (2, 6),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 2), (4, 3), (5, 4))),
    ],
)
def test_every_collective_matches_native_mpi(ranks, step):
    done = run(ranks, "tests/mpi/compare_native.py", str(step))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["compared"] > (2000 if step < 6 else 1000)


def test_collectives_progress_without_a_background_thread():
    environment = {"MPI4PY_RC_THREAD_LEVEL": "serialized"}
    done = run(2, "tests/mpi/compare_native.py", "5", environment=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["wrong"] == []


SAME = "Pass the same count, type, root, operation, codec, chunk and algorithm on every rank."
ODD = {
    "count": "Bcast of {} x float32, root 0, codec split",
    "dtype": "Allreduce of {} x float64, sum, codec split",
    "root": "Bcast of {} x float32, root 1, codec split",
    "operation": "Allreduce of {} x float32, max, codec split",
    "codec": "Bcast of {} x float32, root 0, codec mpc",
    "algorithm": "Bcast of {} x float32, root 0, codec split, algorithm tree, chunk 524288",
    "collective": "Bcast of {} x float32, root 0, codec split",
    "named": "Iallreduce of {} x float32, sum, codec split, algorithm ring, chunk 40000",
    "started": "Iallgather of {} x float32, codec split, algorithm ring, chunk 524288",
}
"""The signature of rank 1 in each case."""


def test_a_mismatch_is_an_error_on_all_ranks_that_names_each_signature():
    done = run(3, "tests/mpi/disagreement.py")
    assert done.returncode == 0, done.stderr
    by_rank = json.loads(done.stdout)
    for rank, errors in enumerate(by_rank):
        assert errors["usable"]
        assert errors["count 1000"] == (
            f"AgreementError: rank {rank}: Bcast (call 1): expected the same call on every rank, got ranks 0, 2: "
            "Bcast of 1000 x float32, root 0, codec split, native MPI; "
            f"rank 1: Bcast of 1001 x float32, root 0, codec split, native MPI. {SAME}"
        )
        for (name, signature), count in product(ODD.items(), (1000, 50_000)):
            error, odd = errors[f"{name} {count}"], count + (name in ("count", "started"))
            assert error.startswith(f"AgreementError: rank {rank}: ") and error.endswith(SAME)
            assert f"; rank 1: {signature.format(odd)}" in error, error
        refused = "codec split: expected elements of type float16 or bfloat16 or float32 or float64, got int32."
        for count in (1000, 50_000):
            error = errors[f"refused {count}"]
            assert refused in error and error.startswith("BufferSpecError" if rank == 1 else "AgreementError")


DEADLOCK = "expected every rank to join the calls that others wait for, got"
REMEDY = "Start collectives before waiting for others, or wait for them in the same order on every rank."


def test_a_deadlock_is_an_error_on_all_ranks_that_names_who_waits_for_what():
    done = run(3, "tests/mpi/deadlock.py", "circle")
    assert done.returncode == 0, done.stderr
    who = (
        "rank 0 waits for allreduce 'A', which rank 1 has not joined; "
        "rank 1 waits for allreduce 'B', which ranks 0, 2 have not joined; "
        "rank 2 waits for allreduce 'A', which rank 1 has not joined"
    )
    assert json.loads(done.stdout) == [
        [f"DeadlockError: rank {rank}: collectives: {DEADLOCK} {who}. {REMEDY}", True] for rank in range(3)
    ]


def test_a_rank_that_does_not_join_is_named_after_the_timeout():
    done = run(3, "tests/mpi/deadlock.py", "absent")
    assert done.returncode == 0, done.stderr
    for rank, (error, usable) in enumerate(json.loads(done.stdout)):
        assert error.startswith(f"DeadlockError: rank {rank}: collectives: {DEADLOCK} ")
        assert "rank 0 waits for broadcast (call 1), which rank 1 has not joined" in error
        assert "rank 1 is not blocked here" in error
        assert usable


def test_ranks_that_hang_inside_mpi_are_aborted_with_a_reason():
    done = run(3, "tests/mpi/deadlock.py", "mixed")
    assert done.returncode != 0
    assert f"collectives: {DEADLOCK} rank 0 waits for native MPI Allreduce (call 2), which rank 1 has not joined; " in (
        done.stderr
    )
    assert "rank 1 waits for allreduce (call 2), which ranks 0, 2 have not joined" in done.stderr
