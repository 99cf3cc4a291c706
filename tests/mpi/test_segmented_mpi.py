"""Segmented and relayed messages under mpirun."""

from __future__ import annotations

import json

import pytest
from launch import needs_mpirun, run

pytestmark = needs_mpirun

SEGMENTED = "tests/mpi/segmented.py"


@pytest.mark.parametrize(("ranks", "step"), [(2, 19), pytest.param(5, 23, marks=pytest.mark.slow)])
def test_collectives_match_mpi(ranks, step):
    done = run(ranks, SEGMENTED, "tests/mpi/compare_native.py", str(step))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["compared"] > 400


def test_collectives_match_mpich(mpich):
    done = run(3, SEGMENTED, "tests/mpi/compare_native.py", "23", mpich=mpich)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["mpi"].startswith("MPICH")
    assert found["wrong"] == []


def test_collectives_in_any_order():
    done = run(5, SEGMENTED, "tests/mpi/any_order.py", "3")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 5: 200 collectives right" for rank in range(5)]


def test_a_damaged_frame_fails_on_all_ranks_and_leaves_nothing_in_flight():
    done = run(4, SEGMENTED, "tests/mpi/peer_errors.py", "wire", "20")
    assert done.returncode == 0, done.stderr
    found = 0
    for ranks in zip(*json.loads(done.stdout), strict=True):
        assert all(one["others"] == ["no error"] and one["again"] == "no error" for one in ranks), ranks
        finder = ranks[ranks[0]["culprit"]]["finder"]
        if finder is not None:
            # A damaged frame may have been relayed before it was checked, and be found by later ranks too.
            assert "FrameError: " in ranks[finder]["target"], ranks
            found += 1
    assert found >= 8


def test_receives_in_any_order_cancelled_and_discarded():
    done = run(3, "-m", "mpi4py", "tests/mpi/segments.py")  # mpi4py aborts all ranks when one fails
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: all right" for rank in range(3)]


def test_an_invalid_setting_on_one_rank_is_an_error_on_all():
    program = """
import os
from mpi4py import MPI
from mpi_gpucomp import Communicator
from mpi_gpucomp._dispatch import runtime
rank = MPI.COMM_WORLD.rank
runtime.processor_name = lambda: str(rank)
if rank == 1:
    os.environ["MPI_GPUCOMP_SEGMENT_BYTES"] = "much"
try:
    Communicator(MPI.COMM_WORLD, wire="mpi")
except ValueError as error:
    print(error)
"""
    done = run(3, "-m", "mpi4py", "-c", program)
    assert done.returncode == 0, done.stderr
    text = (
        "environment variable MPI_GPUCOMP_SEGMENT_BYTES: expected at least 8193 bytes, or 0 for messages that are "
        "sent whole, got {}. Change or unset it."
    )
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank}: {text.format(repr('much') if rank == 1 else 'an invalid value on rank 1')}" for rank in range(3)
    ]
