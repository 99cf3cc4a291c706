"""One rank of a run of PyTorch's own distributed tests: runs tests in turn, and rank 0 says how each ended.

    mpirun -n 4 python tests/torch/conforming.py NAME FIRST [TEST...]

PyTorch's tests ask by the name of the backend which of them apply. Under the names gloo and mpi our groups stand in for
those that torch has (or does not have), so that the tests meant for them run as well.
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
from mpi_gpucomp.torch.backend import make
from mpi_gpucomp.torch.register import NAME

WORLD = MPI.COMM_WORLD
USUAL_TIMEOUT = timedelta(seconds=100)
SEED = 1234
FEATURES = "ddp", "subgroup", "gpu", "cuda"


def prepare(name: str) -> Any:
    """Import PyTorch's tests under the name of a backend, and return their class."""
    directory = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    for inner in ("barrier", "test_dir", "init_dir"):
        Path(directory, inner).mkdir(exist_ok=True)
    os.environ |= {"BACKEND": name, "WORLD_SIZE": str(WORLD.size), "TEMP_DIR": directory}
    os.environ["INIT_METHOD"] = f"file://{directory}/again"  # by which tests make another world
    if name == "gloo":
        distributed_c10d.ProcessGroupGloo = StandIn
    elif name == "mpi":
        distributed_c10d.ProcessGroupMPI = SimpleNamespace(create=_created)
        distributed_c10d._MPI_AVAILABLE = True
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in FEATURES:
        DistTestCases.backend_feature[feature].add(name)
    from torch.testing._internal.distributed import distributed_test

    # Under a name of torch's own, tests also look for the marks that its C++ side leaves in a profile.
    for marked in ("PROFILING", "CUDA_PROFILING", "SEND_RECV_PROFILING"):
        getattr(distributed_test, f"{marked}_SUPPORTED_BACKENDS").clear()

    class Tests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        pass

    return Tests


class _AnyOfOurs(type):
    def __instancecheck__(cls, group: object) -> bool:
        return isinstance(group, mpi_gpucomp.torch.Group)


class StandIn(metaclass=_AnyOfOurs):
    """What torch takes for gloo's class of groups, and makes ours."""

    def __new__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """Make one of our groups, with options that torch may write on."""
        group = make(SimpleNamespace(store=store, group_rank=rank, group_size=size, timeout=timeout), None)
        group.options = SimpleNamespace()
        return group


def _created(ranks: list[int]) -> Any:
    """Make a group as torch would have MPI make it: of all ranks, or of these, and none elsewhere."""
    ranks = ranks or list(range(WORLD.size))
    if WORLD.rank not in ranks:
        return None
    members = {f"rank {index}": str(rank) for index, rank in enumerate(ranks)}
    store = SimpleNamespace(set=lambda key, value: None, get=members.__getitem__)
    return make(
        SimpleNamespace(store=store, group_rank=ranks.index(WORLD.rank), group_size=len(ranks), timeout=USUAL_TIMEOUT),
        None,
    )


LEFT_OUT = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
}
"""Tests that PyTorch does not mark as not for us, and that cannot pass here."""
OURS_ONLY = {"test_ddp_logging_data_cpu": "wants the name of the backend from C++: passes under our own"}


def run_one(tests: Any, name: str, test: str) -> tuple[str, str]:
    """Run one test as PyTorch's runner does in a rank, and return how it ended and why."""
    if why := LEFT_OUT.get(test) or (OURS_ONLY.get(test) if name != NAME else None):
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
    meeting = WORLD.bcast(tempfile.mktemp(dir=os.environ["TEMP_DIR"]) if WORLD.rank == 0 else None)
    set_rng_seed(SEED)
    case = tests(test)
    case.rank, case.file_name = WORLD.rank, meeting
    rest = {} if name == "mpi" else {"rank": WORLD.rank, "world_size": WORLD.size, "init_method": f"file://{meeting}"}
    dist.init_process_group(name, timeout=USUAL_TIMEOUT, **rest)
    try:
        getattr(case, test)()
        return "passed", ""
    except unittest.SkipTest as skipped:
        return "skipped", str(skipped)
    except SystemExit as left:
        reasons = [skip.message for skip in TEST_SKIPS.values() if skip.exit_code == left.code]
        return ("skipped", reasons[0]) if reasons else ("failed", f"SystemExit {left.code}")
    except Exception as error:
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def main(name: str, first: int, wanted: list[str]) -> None:
    """Run all tests from the first one wanted on."""
    tests = prepare(name)
    names = [test for test in unittest.TestLoader().getTestCaseNames(tests) if not wanted or test in wanted]
    for number, test in enumerate(names[first:], first):
        if WORLD.rank == 0:
            print(f"\n@start {number} {test}", flush=True)
        begun = time.monotonic()
        ended = WORLD.allgather(run_one(tests, name, test))
        if dist.is_initialized():
            dist.destroy_process_group()
        worst = next((kind for kind in ("failed", "passed", "skipped") if any(kind == e[0] for e in ended)), "passed")
        why = next((reason for kind, reason in ended if kind == worst), "")
        if WORLD.rank == 0:
            print(f"\n@end {number} {worst} {time.monotonic() - begun:.1f} {why}", flush=True)
    if WORLD.rank == 0:
        print("\n@over", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    sys.exit(0)
