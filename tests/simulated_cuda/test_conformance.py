"""The library on the simulated CUDA machine: the tests of devices and codecs, and collectives under mpirun.

The seed differs from run to run and is printed; `MPI_GPUCOMP_SIMULATED_CUDA=seed=N` repeats one, here and for the tests
themselves: `MPI_GPUCOMP_SIMULATED_CUDA=seed=N python -m pytest tests/unit -k cuda:0`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from launch import needs_mpirun, run

from simulated_cuda import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = [
    "unit/test_device.py",
    "unit/test_cuda.py",
    "unit/test_packing.py",
    "unit/test_frame.py",
    "unit/test_split.py",
]
SAMPLE += ["unit/test_contract.py", "unit/test_none.py", "kernels/test_checksum.py", "kernels/test_tiles.py", "golden"]
EVERYTHING = ["unit", "kernels", "golden"]
COUNT = 70000


@pytest.fixture(scope="module")
def settings() -> str:
    """Return the settings of the environment, or a seed."""
    chosen = os.environ.get(SETTINGS) or f"seed={secrets.randbelow(1 << 30)}"
    print(f"{SETTINGS}={chosen}")
    return chosen


def conform(paths: list[str], settings: str, least: int) -> None:
    """Run the tests of a GPU that are in these files or folders, at least a number of them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-k", "cuda or gpu"]
    files = [str(ROOT / "tests" / path) for path in paths]
    done = subprocess.run(
        [*command, *files],
        cwd=ROOT,
        env=os.environ | {SETTINGS: settings, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, f"{SETTINGS}={settings}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"
    assert passed
    assert int(passed[1]) >= least


def test_devices_and_codecs(settings: str) -> None:
    conform(SAMPLE, settings, 1000)


@pytest.mark.slow
def test_all_devices_and_codecs(settings: str) -> None:
    conform(EVERYTHING, settings, 3000)


CASES = [
    "broadcasts",
    "named_broadcasts",
    "reductions",
    "gathering",
    "messages",
    "persistent",
    "second_gpu",
    "on_rails",
]


@needs_mpirun
@pytest.mark.parametrize("codec", ["none", "split", "zfp:rate=8"])
@pytest.mark.parametrize("case", CASES)
def test_collectives(settings: str, case: str, codec: str) -> None:
    arguments = ("-m", "tests.simulated_cuda", "tests/simulated_cuda/collectives.py", case, codec, str(COUNT))
    done = run(2, *arguments, environment={SETTINGS: f"{settings},devices=2"})
    assert (done.returncode, done.stderr) == (0, ""), f"{SETTINGS}={settings}\n{done.stderr[:6000]}"


@needs_mpirun
@pytest.mark.parametrize("launch", [1, 9])
@pytest.mark.parametrize("case", ["broadcasts", "reductions"])
def test_a_fault_is_an_error_on_every_rank(settings: str, case: str, launch: int) -> None:
    arguments = ("-m", "tests.simulated_cuda", "tests/simulated_cuda/collectives.py", case, "split", str(COUNT))
    faulty = f"{settings},inject=illegal_address:n={launch}"
    done = run(2, *arguments, environment={SETTINGS: faulty, "SIMULATED_CUDA_PATIENCE": "20"})
    assert done.returncode != 0
    assert "rank 0" in done.stderr
    assert re.search(r"DeviceError: .*(cuda:0: CUDA_ERROR_ILLEGAL_ADDRESS in|an illegal memory access)", done.stderr)
    assert "Timeout (" not in done.stderr, f"{SETTINGS}={faulty}\n{done.stderr[:6000]}"


FAULTS = {
    "illegal_address:n=9": "cuda:0: CUDA_ERROR_ILLEGAL_ADDRESS",
    "launch_failed:n=9": "cuda:0: CUDA_ERROR_LAUNCH_FAILED",
    "unavailable:n=60": "cuda:0: CUDA_ERROR_DEVICE_UNAVAILABLE",
}


def errors_of_ranks(case: str, settings: str, **environment: str) -> list[str]:
    """Run a case in which rank 1 fails, and return the errors of both ranks; neither waits for ever."""
    arguments = ("-m", "tests.simulated_cuda", "tests/simulated_cuda/collectives.py", case, "split", str(COUNT))
    environment |= {SETTINGS: settings, "SIMULATED_CUDA_PATIENCE": "60"}
    done = run(2, *arguments, environment=environment)
    assert (done.returncode, done.stderr) == (0, ""), f"{SETTINGS}={settings}\n{done.stderr[:6000]}"
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    return [found[0], found[1]]


@needs_mpirun
@pytest.mark.parametrize("failure", FAULTS)
def test_an_error_names_the_rank_the_gpu_and_the_kernels_behind_which_it_failed(settings: str, failure: str) -> None:
    """All of CUDA's errors come late, so the kernels since the last event are named."""
    other, own = errors_of_ranks("fault", settings, SIMULATED_CUDA_FAULT=failure)
    where = rf"got {FAULTS[failure]} in or before (\w+, )*(split|tiles|frame)_\w+"
    assert re.search(rf"^rank 1: allreduce \(call \d+\), .* {where}", own), own
    assert re.search(rf"^rank 0: allreduce \(call \d+\): .*got on rank 1 DeviceError: .*{where}", other), other


@needs_mpirun
def test_a_gpu_that_is_lost_before_a_call_is_an_error_that_says_so(settings: str) -> None:
    other, own = errors_of_ranks("fault", settings, SIMULATED_CUDA_FAULT="ecc:n=1")
    assert own == (
        "cuda:0: expected a GPU that works, got 'cudaErrorECCUncorrectable: uncorrectable ECC error encountered'. "
        "Earlier work on this GPU failed, or the GPU itself. Start the program again, with CUDA_LAUNCH_BLOCKING=1 "
        "(or compute-sanitizer) to find a kernel that fails."
    )
    assert "rank 1" in other


@needs_mpirun
def test_a_full_gpu_is_an_error_on_every_rank_and_calls_work_once_there_is_memory(settings: str) -> None:
    other, own = errors_of_ranks("full", f"{settings},capacity=48000000")
    what = "expected memory of cuda:0, got none. Free memory, or set a smaller chunk."
    assert own.startswith("rank 1: allreduce")
    assert own.endswith(what)
    assert other.startswith("rank 0: allreduce")
    assert f"on rank 1 DeviceError: {own}" in other
