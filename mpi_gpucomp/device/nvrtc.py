"""Compiles a kernel family for one GPU architecture, and keeps the result on disk.

CuPy's own compilation is not used because it always adds `-ftz=true`: denormal numbers would become zero, and the
encoded bytes would differ from the host's. Compiling needs NVRTC but no GPU.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path

from mpi_gpucomp.device.build import kernels_directory
from mpi_gpucomp.errors import DeviceError

__all__ = ["OPTIONS", "compiled", "family_of"]

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
