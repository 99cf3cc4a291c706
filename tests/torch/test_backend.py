"""The backend of torch.distributed, as users run it: operations beside gloo, policies, training, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, needs_mpirun, run

pytest.importorskip("torch", reason="torch is not installed")

HERE = Path(__file__).parent


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines that a job has printed, which must have ended well."""
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@needs_mpirun
@pytest.mark.parametrize("ranks", [1, 4])
def test_every_operation_does_what_gloo_does_and_more(ranks: int) -> None:
    assert said(run(ranks, "-W", "error", "tests/torch/operations.py")) == ["all is well"] * ranks


@needs_mpirun
def test_every_operation_on_mpich(mpich: Path) -> None:
    assert said(run(2, "-W", "error", "tests/torch/operations.py", mpich=mpich)) == ["all is well"] * 2


@needs_mpirun
def test_lossy_broadcasts_leave_all_replicas_identical() -> None:
    assert said(run(3, "-W", "error", "tests/torch/lossy.py")) == ["all is well"] * 3


@needs_mpirun
def test_training_on_two_ranks_bit_for_bit_as_with_gloo() -> None:
    names = ["ddp", "ddp_no_sync", "ddp_hooks", "zero", "fsdp"]
    assert said(run(2, "tests/torch/training.py", *names)) == [f"{name}: as with gloo" for name in names]


@needs_mpirun
def test_training_on_four_ranks() -> None:
    lines = said(run(4, "tests/torch/training.py"))
    assert [line.partition(": ")[2] for line in lines] == ["as with gloo"] * 11 + ["fine"] * 4


@needs_mpirun
def test_errors_and_timeouts_surface_as_torch_users_expect() -> None:
    assert said(run(2, "-W", "error", "tests/torch/failing_backend.py")) == ["all is well"] * 2


@needs_mpirun
@pytest.mark.needs("cuda:0")
def test_tensors_on_gpus() -> None:
    if pytest.importorskip("torch").version.cuda is None:
        pytest.skip("this torch was built without CUDA")
    assert said(run(2, "tests/torch/on_gpus.py")) == ["all is well"] * 2


@needs_mpirun
def test_an_mpi_for_one_thread_is_refused() -> None:
    funneled = "import mpi4py; mpi4py.rc.thread_level = 'funneled'"
    start = "import mpi_gpucomp.torch, torch.distributed as d; d.init_process_group('gpucomp')"
    done = run(1, "-c", f"{funneled}; {start}")
    assert done.returncode != 0
    assert (
        "mpi_gpucomp.errors.DeviceError: rank 0: torch.distributed, backend gpucomp: expected an MPI that several "
        "threads may call (MPI_THREAD_MULTIPLE), got one that was started without. Leave mpi4py.rc.thread_level as it "
        "is, or build MPI with support for threads."
    ) in done.stderr


def _alone(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python with no launcher."""
    launched = ("OMPI_", "PMI_", "PMIX_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=environment,
        check=False,
    )


def test_without_mpirun_it_refuses_and_says_what_to_do() -> None:
    done = _alone("import mpi_gpucomp.torch, torch.distributed as d; d.init_process_group('gpucomp')")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "mpi_gpucomp.errors.DeviceError: torch.distributed, backend gpucomp: expected a process that mpirun has "
        "started, got one that was started by itself. Run it as `mpirun -n 4 python ...`; for one rank, as "
        "`mpirun -n 1 python ...`."
    )


def test_neither_the_import_nor_torch_itself_starts_mpi() -> None:
    code = "import sys, torch, mpi_gpucomp.torch; print([n for n in sys.modules if n.startswith('mpi4py')])"
    assert said(_alone(code)) == ["[]"]


def test_the_library_does_not_import_torch() -> None:
    code = "import sys, mpi_gpucomp, mpi_gpucomp.codec, mpi_gpucomp.schedule; print('torch' in sys.modules)"
    assert said(_alone(code)) == ["False"]


def test_torch_finds_the_backend_without_an_import() -> None:
    assert said(_alone("import torch.distributed as d; print('gpucomp' in d.Backend.backend_list)")) == ["True"]
