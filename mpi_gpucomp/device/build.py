"""Builds the host library from `kernels/`, one for each instruction set, and the core; without Python headers.

setup.py runs it; in a checkout run `python mpi_gpucomp/device/build.py`. It imports nothing of the package, so that it
works before anything is installed.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["LIBRARIES", "build", "build_core", "core_directory", "kernels_directory", "library_directory"]

COMMON_FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-psabi"),
    # For the same bytes as on a GPU: the same rounding and integer wrap-around.
    *("-ffp-contract=off", "-fwrapv"),
    # Encoded bytes are accessed in words of several sizes.
    "-fno-strict-aliasing",
    # Floating-point loops are vectorised only if errno and exception flags need not be kept.
    *("-fno-math-errno", "-fno-trapping-math"),
]

X86_LEVELS = {"baseline": [], "x86-64-v3": ["-march=x86-64-v3"], "x86-64-v4": ["-march=x86-64-v4"]}
LIBRARIES = X86_LEVELS if platform.machine() in ("x86_64", "AMD64") else {"baseline": []}
"""The instruction sets built for this processor family, lowest first."""

_HERE = Path(__file__).resolve().parent


def library_directory() -> Path:
    """Return the directory of the built libraries."""
    return _HERE / "lib"


def kernels_directory() -> Path:
    """Return the directory of the kernel sources: in the installed package, or beside it in a checkout."""
    installed = _HERE.parent / "kernels"
    return installed if installed.is_dir() else _HERE.parents[1] / "kernels"


def build(kernels: Path, to: Path, *, extra_flags: list[str] | None = None, only: str | None = None) -> list[Path]:
    """Compile every family for every instruction set, one job per core, and link the libraries into `to`."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = [*COMMON_FLAGS, *(extra_flags or [])]
    levels = {name: march for name, march in LIBRARIES.items() if only in (None, name)}
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as objects, ThreadPoolExecutor(os.cpu_count() or 1) as jobs:
        built: dict[str, list[Path]] = {name: [] for name in levels}
        commands = []
        for name, march in levels.items():
            for source in sorted(kernels.glob("*.cu")):
                target = Path(objects) / f"{name}-{source.stem}.o"
                built[name].append(target)
                commands.append([*compiler, *flags, *march, "-x", "c++", "-c", str(source), "-o", str(target)])
        list(jobs.map(_run, commands))
        return [
            _link([*compiler, *(extra_flags or [])], parts, to / f"libgpucomp-{name}.so")
            for name, parts in built.items()
        ]


CORE_FLAGS = [*("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread"), *("-Wall", "-Wextra")]


def core_directory() -> Path:
    """Return the directory of the core's sources."""
    return _HERE.parent / "core" / "src"


def build_core(sources: Path, to: Path, *, extra_flags: list[str] | None = None) -> Path:
    """Compile the core, one job per processor, and link it into `to`."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = [*CORE_FLAGS, *(extra_flags or [])]
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as objects, ThreadPoolExecutor(os.cpu_count() or 1) as jobs:
        units = sorted(sources.glob("*.cpp"))
        parts = {unit: Path(objects) / f"{unit.stem}.o" for unit in units}
        list(jobs.map(_run, [[*compiler, *flags, "-c", str(unit), "-o", str(part)] for unit, part in parts.items()]))
        return _link([*compiler, *flags], list(parts.values()), to / "libgpucomp-core.so")


def _link(linker: list[str], parts: list[Path], library: Path) -> Path:
    _run([*linker, "-shared", *map(str, parts), "-o", str(library)])
    return library


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SystemExit(
            f"building the host library: expected a C++17 compiler, got none at '{command[0]}'. "
            "Install g++ or clang, or name one in the environment variable CXX."
        ) from None
    if done.returncode:
        raise SystemExit(f"building the host library: {shlex.join(command)} failed:\n{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


if __name__ == "__main__":
    for library in build(kernels_directory(), library_directory()):
        print(library)
    print(build_core(core_directory(), library_directory()))
