"""`Communicator.explain` and the command `explain` under mpirun: the plan of a call, and why."""

from __future__ import annotations

import json

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


PLANS = """
import numpy as np
from mpi4py import MPI
from mpi_gpucomp import Communicator

with Communicator(MPI.COMM_WORLD, "split", roles={"weights": "none"}) as comm:
    values, others = (np.zeros(1 << 20, np.float32) for _ in range(2))
    plan = comm.explain("Bcast", values)
    assert comm.explain("Bcast", others) is plan
    different = [
        comm.explain("Bcast", values, 1),
        comm.explain("Bcast", values[: 1 << 19]),
        comm.explain("Bcast", values.view(np.float64)),
        comm.explain("Bcast", values, chunk=1 << 16),
        comm.explain("Bcast", values, role="weights"),
        comm.explain("Bcast", values, codec="zfp:rate=8"),
        comm.explain("Bcast", values, algorithm="tree"),
        comm.explain("Bcast", values, name="w"),
        comm.explain("Allreduce", values, others),
        comm.explain("Allreduce", values, others, MPI.MAX),
        comm.explain("Allreduce", MPI.IN_PLACE, others),
    ]
    assert len({id(one) for one in (plan, *different)}) == 12
    assert [different[n].codec.spec for n in (4, 5)] == ["none", "zfp:rate=8"]
    assert (different[0].algorithm.spec.root, different[3].chunk_bytes) == (1, 1 << 16)
    assert [one.algorithm.in_place for one in different[-2:]] == [False, True]
    assert different[6].algorithm.name != plan.algorithm.name and different[7].why == "the call has a name"
"""


def test_equal_calls_share_a_plan_and_others_do_not() -> None:
    done = run(2, "-c", PLANS)
    assert done.returncode == 0, done.stderr


def test_more_elements_than_native_mpi_counts_are_for_the_engine_or_an_error() -> None:
    done = run(2, "tests/mpi/large_counts.py")
    assert done.returncode == 0, done.stderr
    for rank, found in enumerate(json.loads(done.stdout)):
        for method in ("Bcast", "Allreduce", "Alltoall"):
            assert found[method].startswith("ENGINE "), found
        too_many = {"Scan": 2147483658} | ({"Gatherv": 2147483650} if rank == 0 else {})
        for method, count in too_many.items():
            assert found[method] == (
                f"BufferSpecError: rank {rank}: {method}: expected counts and displacements of at most 2147483647, as "
                f"native MPI runs this call, got {count}. Pass codec='split' on every rank where the call takes it, or "
                "elements of a larger type."
            )
        for name, topic in (("chunk", "Send"), ("setting", "Communicator")):
            assert found[name] == (
                f"SpecError: rank {rank}: {topic}: expected chunk= as a number of bytes from 1 to 1073741824, "
                "got 3221225472. Change it or leave it out."
            )
