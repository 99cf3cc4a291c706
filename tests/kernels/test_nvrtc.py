"""Every kernel compiles for every GPU architecture, without register spills."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

import pytest
from hardware import HOSTS

from mpi_gpucomp.device.build import kernels_directory
from mpi_gpucomp.device.library import OPTIONS

if TYPE_CHECKING:
    from machines import Host

nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy is not installed")

OLDEST = 75
FAMILIES = sorted(text.stem for text in kernels_directory().glob("*.cu"))
VERBOSE = "--ptxas-options=-v"
PROPERTIES = re.compile(
    r"Function properties for (?P<kernel>\w+)\s+ptxas\s+\.\s+\d+ bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)


def architectures() -> list[object]:
    try:
        return [arch for arch in nvrtc.getSupportedArchs() if arch >= OLDEST]
    except Exception as error:  # the library is loaded at the first call, and its absence raises various errors
        return [pytest.param(0, marks=pytest.mark.skip(reason=f"NVRTC is not installed: {error}"))]


ARCHITECTURES = architectures()


@cache
def compiled(family: str, arch: int) -> tuple[int, str]:
    """Return the machine code and the compiler's log."""
    program = nvrtc.createProgram((kernels_directory() / f"{family}.cu").read_text(), f"{family}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, (*OPTIONS, VERBOSE, f"-I{kernels_directory()}", f"-arch=sm_{arch}"))
        except nvrtc.NVRTCError:
            pytest.fail(nvrtc.getProgramLog(program))
        return len(nvrtc.getCUBIN(program)), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def spills(log: str) -> dict[str, int]:
    """Return the bytes of spill stores and loads of each kernel."""
    return {found["kernel"]: int(found["stores"]) + int(found["loads"]) for found in PROPERTIES.finditer(log)}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_without_warnings(family: str, arch: int) -> None:
    nbytes, log = compiled(family, arch)
    assert nbytes > 0
    assert "warning" not in log.lower(), log


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_kernel_spills(family: str, arch: int) -> None:
    _, log = compiled(family, arch)
    assert spills(log), log
    assert {kernel: nbytes for kernel, nbytes in spills(log).items() if nbytes} == {}


@pytest.mark.parametrize("arch", ARCHITECTURES[:1])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("machine", HOSTS, indirect=True)
def test_the_host_has_the_same_kernels(machine: Host, family: str, arch: int) -> None:
    missing = [kernel for kernel in spills(compiled(family, arch)[1]) if not hasattr(machine.library, kernel)]
    assert missing == []


def test_spills_are_detected() -> None:
    log = """
ptxas info    : Function properties for tight
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for loose
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
"""
    assert spills(log) == {"tight": 0, "loose": 16}
