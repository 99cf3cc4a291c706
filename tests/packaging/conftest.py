from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT_FILES = ["setup.cfg", "setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"]
LEFT_OVERS = shutil.ignore_patterns("__pycache__", "*.so")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy what a build reads, with nothing built in it."""
    tree = tmp_path / "checkout"
    for folder in ("mpi_gpucomp", "kernels"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=LEFT_OVERS)
    for name in PROJECT_FILES:
        shutil.copy(ROOT / name, tree / name)
    return tree
