"""One rank of a run of PyTorch's distributed tests: runs the tests one by one; rank 0 prints the outcomes.

    mpirun -n 4 python tests/torch/conformance_rank.py BACKEND FIRST [TEST...]

PyTorch selects its tests by the name of the backend. Under the names gloo and mpi, our process groups replace torch's,
so that the tests written for those backends run too.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import distributed_c10d

import mpi_gpucomp.torch
from mpi_gpucomp._torch_plugin import BACKEND_NAME
from mpi_gpucomp.torch.backend import create

WORLD = MPI.COMM_WORLD
DEFAULT_TIMEOUT = timedelta(seconds=100)
SEED = 1234
FEATURES = "ddp", "subgroup", "gpu", "cuda"


def load_tests(name: str) -> Any:
    """Import PyTorch's tests for a backend and return the test class."""
    directory = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    for inner in ("barrier", "test_dir", "init_dir"):
        Path(directory, inner).mkdir(exist_ok=True)
    os.environ |= {"BACKEND": name, "WORLD_SIZE": str(WORLD.size), "TEMP_DIR": directory}
    os.environ["INIT_METHOD"] = f"file://{directory}/again"  # for tests that create another default group
    if name == "gloo":
        distributed_c10d.ProcessGroupGloo = GlooReplacement
    elif name == "mpi":
        distributed_c10d.ProcessGroupMPI = SimpleNamespace(create=_create_mpi)
        distributed_c10d._MPI_AVAILABLE = True
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in FEATURES:
        DistTestCases.backend_feature[feature].add(name)
    from torch.testing._internal.distributed import distributed_test

    # For its own backends, PyTorch also checks profiler events that its C++ code records.
    for event in ("PROFILING", "CUDA_PROFILING", "SEND_RECV_PROFILING"):
        getattr(distributed_test, f"{event}_SUPPORTED_BACKENDS").clear()

    class Tests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        pass

    return Tests


class _IsGpucomp(type):
    def __instancecheck__(cls, group: object) -> bool:
        return isinstance(group, mpi_gpucomp.torch.GpucompProcessGroup)


class GlooReplacement(metaclass=_IsGpucomp):
    """Replaces ProcessGroupGloo; creates our process groups."""

    def __new__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """Create a group whose options torch may modify."""
        group = create(SimpleNamespace(store=store, group_rank=rank, group_size=size, timeout=timeout), None)
        group.options = SimpleNamespace()
        return group


def _create_mpi(ranks: list[int]) -> Any:
    """Create a group as ProcessGroupMPI.create does: of the ranks given or of all; None on other ranks."""
    ranks = ranks or list(range(WORLD.size))
    if WORLD.rank not in ranks:
        return None
    members = {f"rank {index}": str(rank) for index, rank in enumerate(ranks)}
    store = SimpleNamespace(set=lambda key, value: None, get=members.__getitem__)
    return create(
        SimpleNamespace(
            store=store, group_rank=ranks.index(WORLD.rank), group_size=len(ranks), timeout=DEFAULT_TIMEOUT
        ),
        None,
    )


SKIPPED = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
}
"""Tests that cannot pass here, and that PyTorch does not skip."""
GPUCOMP_ONLY = {"test_ddp_logging_data_cpu": "needs the name of the backend from C++; passes as gpucomp"}


def run_one(tests: Any, name: str, test: str) -> tuple[str, str]:
    """Run one test as PyTorch's runner does in a rank; return the outcome and the reason."""
    if why := SKIPPED.get(test) or (GPUCOMP_ONLY.get(test) if name != BACKEND_NAME else None):
        return "skipped", why
    method = getattr(tests, test)
    if getattr(method, "__unittest_skip__", False):
        return "skipped", method.__unittest_skip_why__
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import set_rng_seed
    from torch.testing._internal.distributed.distributed_test import Barrier

    if WORLD.rank == 0:
        Barrier.init()
    Barrier.barrier_id = 0
    store_file = WORLD.bcast(tempfile.mktemp(dir=os.environ["TEMP_DIR"]) if WORLD.rank == 0 else None)
    set_rng_seed(SEED)
    case = tests(test)
    case.rank, case.file_name = WORLD.rank, store_file
    rendezvous = (
        {} if name == "mpi" else {"rank": WORLD.rank, "world_size": WORLD.size, "init_method": f"file://{store_file}"}
    )
    dist.init_process_group(name, timeout=DEFAULT_TIMEOUT, **rendezvous)
    try:
        getattr(case, test)()
        return "passed", ""
    except unittest.SkipTest as skipped:
        return "skipped", str(skipped)
    except SystemExit as exit_:
        reasons = [skip.message for skip in TEST_SKIPS.values() if skip.exit_code == exit_.code]
        return ("skipped", reasons[0]) if reasons else ("failed", f"SystemExit {exit_.code}")
    except Exception as error:
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def main(name: str, first: int, selected: list[str]) -> None:
    """Run the selected tests, or all, starting with number `first`."""
    tests = load_tests(name)
    names = [test for test in unittest.TestLoader().getTestCaseNames(tests) if not selected or test in selected]
    for number, test in enumerate(names[first:], first):
        if WORLD.rank == 0:
            print(f"\n@start {number} {test}", flush=True)
        start = time.monotonic()
        outcomes = WORLD.allgather(run_one(tests, name, test))
        if dist.is_initialized():
            dist.destroy_process_group()
        worst = next(
            (kind for kind in ("failed", "passed", "skipped") if any(kind == o[0] for o in outcomes)), "passed"
        )
        why = next((reason for kind, reason in outcomes if kind == worst), "")
        if WORLD.rank == 0:
            print(f"\n@end {number} {worst} {time.monotonic() - start:.1f} {why}", flush=True)
    if WORLD.rank == 0:
        print("\n@done", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    sys.exit(0)
