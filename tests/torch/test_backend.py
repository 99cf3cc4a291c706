"""The torch.distributed backend under mpirun: operations, lossy codecs, training, errors."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from launch import needs_mpirun, run

torch = pytest.importorskip("torch", reason="torch is not installed")


def output(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines printed by a job, which must have succeeded."""
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@needs_mpirun
@pytest.mark.parametrize("ranks", [1, 4])
def test_operations(ranks: int) -> None:
    assert output(run(ranks, "-W", "error", "tests/torch/operations.py")) == ["passed"] * ranks


@needs_mpirun
def test_operations_on_mpich(mpich: Path) -> None:
    lines = output(run(2, "-W", "error", "tests/torch/operations.py", mpich=mpich))
    assert "".join(lines) == "passed" * 2  # MPICH's mpiexec may mix the lines of two ranks


@needs_mpirun
def test_lossy_broadcasts_leave_all_replicas_identical() -> None:
    assert output(run(3, "-W", "error", "tests/torch/lossy_codecs.py")) == ["passed"] * 3


@needs_mpirun
def test_training_on_two_ranks_is_bitwise_equal_to_gloo() -> None:
    names = ["ddp", "ddp_no_sync", "ddp_hooks", "zero", "fsdp"]
    assert output(run(2, "tests/torch/training.py", *names)) == [f"{name}: equal to gloo" for name in names]


@needs_mpirun
@pytest.mark.slow
def test_training_on_four_ranks() -> None:
    lines = output(run(4, "tests/torch/training.py"))
    assert [line.partition(": ")[2] for line in lines] == ["equal to gloo"] * 11 + ["passed"] * 4


@needs_mpirun
def test_errors_and_timeouts() -> None:
    assert output(run(2, "-W", "error", "tests/torch/backend_errors.py")) == ["passed"] * 2


@needs_mpirun
@pytest.mark.needs("cuda:0")
def test_tensors_on_gpus() -> None:
    if torch.version.cuda is None:
        pytest.skip("torch was built without CUDA")
    assert output(run(2, "tests/torch/gpu_tensors.py")) == ["passed"] * 2


@needs_mpirun
def test_mpi_without_thread_multiple_is_an_error() -> None:
    funneled = "import mpi4py; mpi4py.rc.thread_level = 'funneled'"
    start = "import mpi_gpucomp.torch, torch.distributed as d; d.init_process_group('gpucomp')"
    done = run(1, "-c", f"{funneled}; {start}")
    assert done.returncode != 0
    assert (
        "mpi_gpucomp.errors.DeviceError: rank 0: torch.distributed, backend gpucomp: expected MPI initialised with "
        "MPI_THREAD_MULTIPLE, got MPI_THREAD_FUNNELED. Do not lower mpi4py.rc.thread_level, and use an MPI library "
        "built with thread support."
    ) in done.stderr
