from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="import-linter is not installed")

LAYERS = "Imports go downwards only, and siblings do not import each other"
MONITOR = "The monitor reads traces alone: no MPI, and nothing of what it observes"
PURE = "Schedules are pure Python: no MPI, no GPU, no codec objects"
BENCH = "The library does not know its benchmarks"

VIOLATIONS = {
    "device/upwards.py": ("import mpi_gpucomp.codec", LAYERS),
    "codec/sideways.py": ("import mpi_gpucomp.transport", LAYERS),
    "unlisted.py": ("", LAYERS),
    "engine/observer.py": ("import mpi_gpucomp.monitor", LAYERS),
    "transport/observer.py": ("import mpi_gpucomp.monitor", LAYERS),
    "monitor/engine.py": ("import mpi_gpucomp.engine", MONITOR),
    "monitor/mpi.py": ("import mpi4py", MONITOR),
    "schedule/wire.py": ("import mpi4py", PURE),
    "schedule/gpu.py": ("import cupy", PURE),
    "schedule/object.py": ("import mpi_gpucomp.codec", PURE),
    "codec/bench.py": ("import osu_bench", BENCH),
}


def lint(checkout: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    return subprocess.run(
        [*command, "--no-cache"], cwd=checkout, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_layers_hold(checkout: Path) -> None:
    done = lint(checkout)
    assert done.returncode == 0, done.stdout
    assert "Contracts: 4 kept, 0 broken." in done.stdout


@pytest.mark.parametrize("module", VIOLATIONS)
def test_a_forbidden_import_is_found(checkout: Path, module: str) -> None:
    text, contract = VIOLATIONS[module]
    package = checkout / "mpi_gpucomp"
    for folder in ("transport", "schedule"):
        (package / folder).mkdir(exist_ok=True)
        (package / folder / "__init__.py").touch()
    (package / module).write_text(text)
    done = lint(checkout)
    assert done.returncode == 1, done.stdout
    assert f"{contract} BROKEN" in done.stdout
