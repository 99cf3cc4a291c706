"""`Communicator.explain` and the command `explain` under mpirun: the plan of a call, and why."""

from __future__ import annotations

import pytest
from launch import needs_mpirun, run

pytestmark = needs_mpirun


@pytest.mark.parametrize("collective", ["Bcast", "reduce", "allreduce", "allgather", "alltoall", "gather", "scatter"])
def test_the_command_prints_the_plan_of_a_call(collective: str) -> None:
    done = run(2, "-m", "mpi_gpucomp", "explain", collective, "--size", "8M", "--codec", "split", "--chunk", "64K")
    assert done.returncode == 0, done.stderr
    title, route, algorithm, codec, chunk, why = done.stdout.splitlines()
    assert title.lower().startswith(collective.lower()) and title.endswith(" float32, 2 ranks")
    where = "route: engine over mpi: all ranks are on one host"
    assert (route, codec, chunk) == (where, "codec: split", "chunk: 65536 bytes")
    assert algorithm.startswith("algorithm: ")
    assert why == "why: codec split, and the message is not small"


def test_a_small_message_is_passed_through() -> None:
    done = run(2, "-m", "mpi_gpucomp", "explain", "Bcast", "--size", "1K", "--codec", "split")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["route: native MPI", "why: 1024 bytes, at most 32768 are passed through"]


def test_explaining_auto_says_how_it_was_chosen() -> None:
    done = run(2, "-m", "mpi_gpucomp", "explain", "Bcast", "--size", "8M", "--codec", "auto")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "why: auto, predicted by the model"
