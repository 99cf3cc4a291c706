"""Messages that are cut into pieces, and sent on in pieces, under mpirun."""

from __future__ import annotations

import json

import pytest
from launch import needs_mpirun, run

pytestmark = needs_mpirun

IN_PIECES = "tests/mpi/in_pieces.py"


@pytest.mark.parametrize(("ranks", "step"), [(2, 19), (5, 23)])
def test_collectives_give_what_mpi_gives(ranks, step):
    done = run(ranks, IN_PIECES, "tests/mpi/against_mpi.py", str(step))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["compared"] > 400


def test_so_they_do_with_mpich(mpich):
    done = run(3, IN_PIECES, "tests/mpi/against_mpi.py", "23", mpich=mpich)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["mpi"].startswith("MPICH")
    assert found["wrong"] == []


def test_any_order_will_do():
    done = run(5, IN_PIECES, "tests/mpi/any_order.py", "3")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 5: 200 collectives right" for rank in range(5)]


def test_damage_is_heard_by_all_and_nothing_is_left_on_the_wire():
    done = run(4, IN_PIECES, "tests/mpi/failing.py", "wire", "20")
    assert done.returncode == 0, done.stderr
    found = 0
    for told in zip(*json.loads(done.stdout), strict=True):
        assert all(one["others"] == ["no error"] and one["again"] == "no error" for one in told), told
        finder = told[told[0]["culprit"]]["finder"]
        if finder is not None:
            # What was damaged may have been sent on before that was known, and be found by those behind, too.
            assert "FrameError: " in told[finder]["target"], told
            found += 1
    assert found >= 8


def test_messages_may_be_asked_for_in_any_order_taken_back_and_thrown_away():
    done = run(3, "-m", "mpi4py", "tests/mpi/pieces.py")  # which ends all ranks when one fails
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: all right" for rank in range(3)]


def test_a_wrong_setting_of_one_rank_is_refused_by_all():
    program = """
import os
from mpi4py import MPI
from mpi_gpucomp import Communicator
from mpi_gpucomp._dispatch import runtime as nodes
rank = MPI.COMM_WORLD.rank
nodes.processor = lambda: str(rank)
if rank == 1:
    os.environ["MPI_GPUCOMP_SEGMENT_BYTES"] = "much"
try:
    Communicator(MPI.COMM_WORLD)
except ValueError as error:
    print(error)
"""
    done = run(3, "-m", "mpi4py", "-c", program)
    assert done.returncode == 0, done.stderr
    said = (
        "environment variable MPI_GPUCOMP_SEGMENT_BYTES: expected at least 8193 bytes, or 0 for messages that are "
        "sent whole, got {}. Change or unset it."
    )
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank}: {said.format(repr('much') if rank == 1 else 'an invalid value on rank 1')}" for rank in range(3)
    ]
