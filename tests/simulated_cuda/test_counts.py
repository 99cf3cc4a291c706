"""The table of what kernels do, and the page that has it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpi_gpucomp.device.build import kernels_directory
from simulated_cuda import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "GPU.md").read_text()


def test_the_table_has_kernels_of_every_family() -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC comes with CuPy", exc_type=ImportError)
    command = [sys.executable, "-m", "tests.simulated_cuda", "counts", "5003"]
    environment = {name: value for name, value in os.environ.items() if name != SETTINGS}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    header, rule, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines())
    assert {len(row) for row in (header, rule, *rows)} == {12}
    assert " | ".join(header) in PAGE
    shown = {row[0] for row in rows}
    for family in kernels_directory().glob("*.cu"):
        assert any(kernel.startswith(f"{family.stem}_") for kernel in shown), family.stem
    found = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    # A sum reads two arrays and writes one, with whole requests of 128 bytes; memory is its limit.
    reduction = found["reduce_f32"]
    assert (reduction["read"], reduction["written"], reduction["limit"]) == ("2.00", "1.00", "memory")
    assert (reduction["sectors / load"], reduction["/ store"]) == ("4.0", "4.0")


def test_the_tests_that_the_page_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) == 10
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), test
