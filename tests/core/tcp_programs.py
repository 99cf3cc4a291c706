"""Compiles the C++ of the TCP wire for tests."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "mpi_gpucomp" / "core" / "src"
TCP = [SOURCES / f"tcp_{name}.cpp" for name in ("sequence", "match", "link", "wire")]
FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SHARED = ["-shared", "-fPIC"]


def compile_to(target: Path, sources: list[Path], flags: list[str]) -> Path:
    """Compile and link."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    command = [*compiler, *FLAGS, *flags, *map(str, sources), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target
