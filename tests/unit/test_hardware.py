"""Tests that need a GPU, where there is none: counted, not skipped one by one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_cuda import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ["tests/golden/test_golden.py", "-k", "none and float32"]
WITHOUT_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""}
WITHOUT_GPU.pop(SETTINGS, None)  # nor a simulated one


def run_pytest(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=WITHOUT_GPU, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, text
    return int(found[1])


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_the_summary_counts_every_test_that_needs_a_gpu(workers: list[str]) -> None:
    every = number(r"(\d+)/\d+ tests collected", run_pytest("--collect-only", "--gpu", *GOLDEN))
    output = run_pytest(*GOLDEN, *workers)
    passed = number(r"(\d+) passed", output)
    deselected = number(r"(?m)^(\d+) tests need a GPU; none found: \S.*$", output)
    assert passed + deselected == every
    assert deselected > 0
    assert "skipped" not in output


def test_a_missing_gpu_is_a_failure_where_one_is_asked_for() -> None:
    output = run_pytest("--gpu", *GOLDEN)
    assert number(r"(\d+) failed", output) > 0
    assert "tests need a GPU" not in output
