"""Loads the host library: of the builds that are there, the most demanding one that this processor runs.

The environment variable `MPI_GPUCOMP_HOST_LIBRARY` forces one build, by its name or by the path of a file (of a debug
build, say). There is no slow path behind it: without a library the first use of a kernel is an error that says how to
get one.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi_gpucomp import config
from mpi_gpucomp.device.build import LIBRARIES, kernels_directory, library_directory
from mpi_gpucomp.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "OPTIONS",
    "VARIABLE",
    "Loaded",
    "arguments",
    "choose",
    "compiled",
    "family_of",
    "kernel",
    "loaded",
    "processor_flags",
    "runnable",
]

VARIABLE = config.HOST_LIBRARY.variable

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
    chosen = choose(library_directory(), processor_flags(), config.HOST_LIBRARY.get())
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


# Compiles a kernel family for one GPU architecture, and keeps the result on disk.
#
# CuPy's own compilation is not used because it always adds `-ftz=true`: denormal numbers would become zero, and the
# encoded bytes would differ from the host's. Compiling needs NVRTC but no GPU.

OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
"""The roundings of the host: no fused multiply-add, no flushing of denormal numbers."""


def family_of(kernel: str, families: list[str] | None = None) -> str:
    """Return the family (the stem of a file in `kernels/`) of a kernel: the longest one that its name starts with."""
    known = sorted(path.stem for path in kernels_directory().glob("*.cu")) if families is None else families
    fitting = [family for family in known if kernel == family or kernel.startswith(f"{family}_")]
    if not fitting:
        raise DeviceError(
            f"kernel {kernel}",
            expected=f"a name that starts with {' or '.join(known)}",
            got=f"'{kernel}'",
            remedy=f"Check the name against the files in {kernels_directory()}.",
        )
    return max(fitting, key=len)


def compiled(family: str, capability: int) -> Path:
    """Return the file with a family's machine code for a compute capability (90, say), compiled if it is not there."""
    target = _target(capability)
    path = _cache_directory() / f"mpi_gpucomp-{family}-{target}-{_digest(family)}.cubin"
    if not path.is_file():
        _write_whole(path, _compile(family, target))
    return path


def _target(capability: int) -> str:
    """Machine code where NVRTC knows the GPU, else the newest portable code, which the driver translates."""
    known = import_module("cupy_backends.cuda.libs.nvrtc").getSupportedArchs()
    return f"sm_{capability}" if capability in known else f"compute_{max(x for x in known if x <= capability)}"


def _compile(family: str, target: str) -> bytes:
    nvrtc = import_module("cupy_backends.cuda.libs.nvrtc")
    source = (kernels_directory() / f"{family}.cu").read_text()
    program = nvrtc.createProgram(source, f"{family}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*OPTIONS, f"-arch={target}", f"-I{kernels_directory()}"))
        code: bytes = nvrtc.getCUBIN(program) if target.startswith("sm_") else nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        raise DeviceError(
            f"kernels {family}.cu for {target}",
            expected="code that NVRTC compiles",
            got=f"{error}\n{nvrtc.getProgramLog(program)}",
            remedy="Install the NVRTC that belongs to your CuPy ('pip install mpi_gpucomp[cuda13]').",
        ) from error
    finally:
        nvrtc.destroyProgram(program)
    return code


@cache
def _digest(family: str) -> str:
    """Name the text: the family, every header, the options and the compiler, any of which may change."""
    kernels = kernels_directory()
    said = hashlib.sha256(repr((OPTIONS, import_module("cupy_backends.cuda.libs.nvrtc").getVersion())).encode())
    for path in [kernels / f"{family}.cu", *sorted(kernels.glob("*.h"))]:
        said.update(path.read_bytes())
    return said.hexdigest()[:16]


def _cache_directory() -> Path:
    directory = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _write_whole(path: Path, code: bytes) -> None:
    """Write a file that other processes see whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(code)
    os.replace(file.name, path)
