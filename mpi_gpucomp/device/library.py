"""Kernel binaries: loads the host library, and compiles kernels for GPUs with NVRTC.

The host library is the installed build with the highest instruction set that this processor supports. The environment
variable `MPI_GPUCOMP_HOST_LIBRARY` selects a build by name or by path (a debug build, for example). There is no
fallback in Python: without a library the first use of a kernel raises an error that explains how to get one.

GPU code is compiled here and not by CuPy, which always adds `-ftz=true`: denormal numbers would become zero, and the
encoded bytes would differ from the host's. Compiling needs NVRTC but no GPU; the result is cached on disk.
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
    "HostLibrary",
    "arguments",
    "cpu_flags",
    "cubin_path",
    "family_of",
    "host_library",
    "kernel",
    "kernel_address",
    "select_library",
    "supported_levels",
]

VARIABLE = config.HOST_LIBRARY.variable

# Flags in /proc/cpuinfo that each level adds to the one below (lzcnt is called abm there).
_V2 = frozenset({"cx16", "popcnt", "ssse3", "sse4_1", "sse4_2"})
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_REQUIRED_FLAGS: dict[str, frozenset[str]] = {"baseline": frozenset(), "x86-64-v3": _V3, "x86-64-v4": _V4}

_log = logging.getLogger("mpi_gpucomp")


class HostLibrary(NamedTuple):
    """A build of the host library: its instruction set (`file` for one selected by path), and its path."""

    level: str
    path: Path


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the CPU flags of /proc/cpuinfo; empty if there are none."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def supported_levels(flags: frozenset[str]) -> list[str]:
    """Return the instruction sets that a processor with these flags supports, highest first."""
    return [level for level in reversed(LIBRARIES) if _REQUIRED_FLAGS[level] <= flags]


def select_library(directory: Path, flags: frozenset[str], selected: str | None = None) -> HostLibrary:
    """Return the best build in `directory` for a processor with these flags, or the selected one."""
    if selected is not None and os.sep in selected:
        return _library_file(Path(selected))
    levels = supported_levels(flags) if selected is None else [_supported(selected, flags)]
    for level in levels:
        path = directory / f"libgpucomp-{level}.so"
        if path.is_file():
            return HostLibrary(level, path)
    raise DeviceError(
        "host library",
        expected=f"a library for {' or '.join(levels)} in {directory}",
        got="none",
        remedy="Install one with 'pip install mpi_gpucomp', or build it with a C++ compiler: "
        "'python mpi_gpucomp/device/build.py'.",
    )


def _library_file(path: Path) -> HostLibrary:
    if path.is_file():
        return HostLibrary("file", path)
    raise DeviceError(
        f"environment variable {VARIABLE}",
        expected="the path of a library",
        got=f"'{path}', which is not a file",
        remedy="Correct the path, or unset it to load the best installed build.",
    )


def _supported(level: str, flags: frozenset[str]) -> str:
    levels = supported_levels(flags)
    if level in levels:
        return level
    known = level in LIBRARIES
    raise DeviceError(
        f"environment variable {VARIABLE}",
        expected=f"{' or '.join(levels)}",
        got=f"{level}, which this processor does not support" if known else f"'{level}'",
        remedy="Set one of these, or unset it to load the best installed build.",
    )


def host_library() -> HostLibrary:
    """Return the library in use; loads it on the first call."""
    return _load()[0]


@cache
def _load() -> tuple[HostLibrary, ctypes.CDLL]:
    selected = select_library(library_directory(), cpu_flags(), config.HOST_LIBRARY.get())
    try:
        library = ctypes.CDLL(str(selected.path))
    except OSError as error:
        raise DeviceError(
            "host library",
            expected=f"a loadable library at {selected.path}",
            got=str(error),
            remedy="Rebuild it on this machine: 'python mpi_gpucomp/device/build.py'.",
        ) from error
    _log.debug("host library: %s from %s", selected.level, selected.path)
    return selected, library


@cache
def kernel(name: str) -> Callable[..., None]:
    """Return the host kernel of this name; it takes ctypes values only (see `arguments`) and releases the GIL."""
    selected, library = _load()
    try:
        function = library[name]
    except AttributeError:
        raise DeviceError(
            f"kernel {name}",
            expected=f"a kernel in {selected.path}",
            got="no such symbol",
            remedy="If the name is right, the library is older than the kernels: 'python mpi_gpucomp/device/build.py'.",
        ) from None
    function.restype = None
    return function


def kernel_address(name: str) -> int:
    """Return the address of a host kernel, for callers that are not Python."""
    function: Any = kernel(name)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def arguments(values: Sequence[int | float]) -> list[Any]:
    """Convert Python numbers to kernel arguments: 64-bit integers (also for addresses) and doubles."""
    return [ctypes.c_double(x) if isinstance(x, float) else ctypes.c_int64(x) for x in values]


OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
"""NVRTC options for the host's rounding: no fused multiply-add, no flushing of denormal numbers."""


def family_of(kernel: str, families: list[str] | None = None) -> str:
    """Return the family (stem of a file in `kernels/`) of a kernel: the longest prefix of its name that is one."""
    known = sorted(path.stem for path in kernels_directory().glob("*.cu")) if families is None else families
    matching = [family for family in known if kernel == family or kernel.startswith(f"{family}_")]
    if not matching:
        raise DeviceError(
            f"kernel {kernel}",
            expected=f"a name that starts with {' or '.join(known)}",
            got=f"'{kernel}'",
            remedy=f"Check the name against the files in {kernels_directory()}.",
        )
    return max(matching, key=len)


def cubin_path(family: str, capability: int) -> Path:
    """Return the cached binary of a family for a compute capability (90, for example); compile it if missing."""
    target = _target(capability)
    path = _cache_directory() / f"mpi_gpucomp-{family}-{target}-{_digest(family)}.cubin"
    if not path.is_file():
        _write_atomically(path, _compile(family, target))
    return path


def _target(capability: int) -> str:
    """Return machine code for a GPU that NVRTC supports, else the newest PTX, which the driver translates."""
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
            expected="a successful NVRTC compilation",
            got=f"{error}\n{nvrtc.getProgramLog(program)}",
            remedy="Install the NVRTC version that matches your CuPy ('pip install mpi_gpucomp[cuda13]').",
        ) from error
    finally:
        nvrtc.destroyProgram(program)
    return code


@cache
def _digest(family: str) -> str:
    """Hash everything that the binary depends on: the family, every header, the options and the compiler."""
    kernels = kernels_directory()
    digest = hashlib.sha256(repr((OPTIONS, import_module("cupy_backends.cuda.libs.nvrtc").getVersion())).encode())
    for path in [kernels / f"{family}.cu", *sorted(kernels.glob("*.h"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cache_directory() -> Path:
    directory = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _write_atomically(path: Path, code: bytes) -> None:
    """Write a file so that other processes see all of it or nothing."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(code)
    os.replace(file.name, path)
