"""The library on the simulated CUDA machine: the tests of devices and codecs, and collectives under mpirun.

The seed differs from run to run and is printed; `MPI_GPUCOMP_SIMULATED_CUDA=seed=N` repeats one, here and for the tests
themselves: `MPI_GPUCOMP_SIMULATED_CUDA=seed=N python -m pytest tests/unit -k cuda:0`.
"""

from __future__ import annotations

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


CASES = ["broadcasts", "named_broadcasts", "reductions", "gathering", "messages", "persistent", "second_gpu"]


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
