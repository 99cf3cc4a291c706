"""Loads the host library: of the builds that are there, the most demanding one that this processor runs.

The environment variable `MPI_GPUCOMP_HOST_LIBRARY` forces one build, by its name or by the path of a file (of a debug
build, say). There is no slow path behind it: without a library the first use of a kernel is an error that says how to
get one.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi_gpucomp.device.build import LIBRARIES, library_directory
from mpi_gpucomp.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["VARIABLE", "Loaded", "arguments", "choose", "kernel", "loaded", "processor_flags", "runnable"]

VARIABLE = "MPI_GPUCOMP_HOST_LIBRARY"

# The words that /proc/cpuinfo has for what each level adds to the one below (lzcnt is called abm there).
_V2 = frozenset({"cx16", "popcnt", "ssse3", "sse4_1", "sse4_2"})
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_NEEDS: dict[str, frozenset[str]] = {"baseline": frozenset(), "x86-64-v3": _V3, "x86-64-v4": _V4}

_log = logging.getLogger("mpi_gpucomp")


class Loaded(NamedTuple):
    """The library in use: its instruction set (`file` where a path was forced), and where it lies."""

    level: str
    path: Path


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return what the processor says it can do; nothing where the system does not tell."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def runnable(flags: frozenset[str]) -> list[str]:
    """Return the instruction sets that a processor with these flags runs, the most demanding first."""
    return [level for level in reversed(LIBRARIES) if _NEEDS[level] <= flags]


def choose(directory: Path, flags: frozenset[str], forced: str | None = None) -> Loaded:
    """Return the best library in `directory` for a processor with these flags, or the forced one."""
    if forced is not None and os.sep in forced:
        return _file(Path(forced))
    levels = runnable(flags) if forced is None else [_allowed(forced, flags)]
    for level in levels:
        path = directory / f"libgpucomp-{level}.so"
        if path.is_file():
            return Loaded(level, path)
    raise DeviceError(
        "host library",
        expected=f"a library for {' or '.join(levels)} in {directory}",
        got="none",
        remedy="Install one with 'pip install mpi_gpucomp', or build it with a C++ compiler: "
        "'python mpi_gpucomp/device/build.py'.",
    )


def _file(path: Path) -> Loaded:
    if path.is_file():
        return Loaded("file", path)
    raise DeviceError(
        f"environment variable {VARIABLE}",
        expected="the path of a library",
        got=f"'{path}', where there is no file",
        remedy="Correct the path, or unset it to get the best library that is installed.",
    )


def _allowed(forced: str, flags: frozenset[str]) -> str:
    levels = runnable(flags)
    if forced in levels:
        return forced
    known = forced in LIBRARIES
    raise DeviceError(
        f"environment variable {VARIABLE}",
        expected=f"{' or '.join(levels)}",
        got=f"{forced}, which this processor does not run" if known else f"'{forced}'",
        remedy="Choose one of these, or unset it to get the best.",
    )


def loaded() -> Loaded:
    """Return the library in use, and load it if that has not happened yet."""
    return _library()[0]


@cache
def _library() -> tuple[Loaded, ctypes.CDLL]:
    chosen = choose(library_directory(), processor_flags(), os.environ.get(VARIABLE) or None)
    try:
        library = ctypes.CDLL(str(chosen.path))
    except OSError as error:
        raise DeviceError(
            "host library",
            expected=f"a library that loads at {chosen.path}",
            got=str(error),
            remedy="Build it again on this machine: 'python mpi_gpucomp/device/build.py'.",
        ) from error
    _log.debug("host library: %s from %s", chosen.level, chosen.path)
    return chosen, library


@cache
def kernel(name: str) -> Callable[..., None]:
    """Return the kernel of this name; it takes ctypes values alone (see `arguments`) and releases the GIL."""
    chosen, library = _library()
    try:
        function = library[name]
    except AttributeError:
        raise DeviceError(
            f"kernel {name}",
            expected=f"a kernel in {chosen.path}",
            got="no such name there",
            remedy="If the name is right, the library is older than the kernels: 'python mpi_gpucomp/device/build.py'.",
        ) from None
    function.restype = None
    return function


def arguments(values: Sequence[int | float]) -> list[Any]:
    """Turn Python numbers into what kernels take: integers and addresses of 64 bits, doubles."""
    return [ctypes.c_double(x) if isinstance(x, float) else ctypes.c_int64(x) for x in values]
