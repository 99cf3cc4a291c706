"""Calls on GPU buffers whose stream has not reached them: on the simulated CUDA machine, which finds what races."""

from __future__ import annotations

import pytest
from launch import needs_mpirun, run
from simulated_cuda import SETTINGS

pytestmark = needs_mpirun

PER_THREAD = {"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": "1"}
AWARE = {"MPI_GPUCOMP_CUDA_AWARE": "1"}


def passes(case: str, environment: dict[str, str]) -> None:
    done = run(2, "-m", "tests.simulated_cuda", "tests/mpi/gpu_order.py", case, environment=environment)
    assert (done.returncode, done.stdout.split()) == (0, ["passed"] * 2), done.stderr


@pytest.mark.parametrize(("per_thread", "seed"), [(False, 1), (True, 2)], ids=["legacy", "per thread"])
@pytest.mark.parametrize("case", ["persistent", "nonblocking", "point_to_point", "strided", "named_stream"])
def test_calls_follow_what_the_caller_has_queued(case: str, per_thread: bool, seed: int) -> None:
    passes(case, {SETTINGS: f"seed={seed}", **(PER_THREAD if per_thread else {})})


def test_nonblocking_collectives_never_give_gpu_addresses_to_mpi() -> None:
    """The MPI library here is not CUDA-aware: it would crash."""
    passes("nonblocking", {SETTINGS: "seed=3", **AWARE})


@pytest.mark.parametrize("case", ["unsupported", "capture"])
def test_what_cannot_work_is_an_error(case: str) -> None:
    passes(case, {SETTINGS: "seed=4"})


def test_managed_and_stream_ordered_memory() -> None:
    passes("kinds_of_memory", {SETTINGS: "seed=5"})


@pytest.mark.parametrize("case", ["several_gpus", "across_gpus"])
def test_several_gpus_in_one_process(case: str) -> None:
    passes(case, {SETTINGS: "seed=6,devices=2"})


@pytest.mark.slow
def test_auto_measures_codecs_on_gpus_where_a_rank_has_one() -> None:
    passes("calibrated", {SETTINGS: "seed=7"})
