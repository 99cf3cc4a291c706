"""Selection and loading of the host library, and the errors when that fails."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpi_gpucomp.device import library
from mpi_gpucomp.device.build import LIBRARIES
from mpi_gpucomp.errors import DeviceError

V2 = {"cx16", "popcnt", "ssse3", "sse4_1", "sse4_2"}
V3 = frozenset(V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
NONE: frozenset[str] = frozenset()

on_x86 = pytest.mark.skipif(len(LIBRARIES) == 1, reason="this processor family has one instruction set only")


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    for level in LIBRARIES:
        (tmp_path / f"libgpucomp-{level}.so").touch()
    return tmp_path


@on_x86
@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (V4, "x86-64-v4"),
        (V3, "x86-64-v3"),
        (V4 - {"avx512vl"}, "x86-64-v3"),
        (V3 - {"fma"}, "baseline"),
        (NONE, "baseline"),
    ],
)
def test_the_highest_supported_level_is_selected(libraries: Path, flags: frozenset[str], level: str) -> None:
    assert library.select_library(libraries, flags) == (level, libraries / f"libgpucomp-{level}.so")


@on_x86
def test_a_missing_build_falls_back_to_the_next_level(libraries: Path) -> None:
    for level in ("x86-64-v4", "x86-64-v3"):
        (libraries / f"libgpucomp-{level}.so").unlink()
        assert library.select_library(libraries, V4).level != level
    assert library.select_library(libraries, V4).level == "baseline"


@on_x86
@pytest.mark.parametrize("level", list(LIBRARIES))
def test_a_level_can_be_selected(libraries: Path, level: str) -> None:
    assert library.select_library(libraries, V4, level).level == level


@on_x86
def test_selecting_an_unsupported_level_is_an_error(libraries: Path) -> None:
    with pytest.raises(DeviceError) as caught:
        library.select_library(libraries, V3, "x86-64-v4")
    assert str(caught.value) == (
        "environment variable MPI_GPUCOMP_HOST_LIBRARY: expected x86-64-v3 or baseline, got x86-64-v4, which this "
        "processor does not support. Set one of these, or unset it to load the best installed build."
    )


def test_selecting_an_unknown_level_is_an_error(libraries: Path) -> None:
    with pytest.raises(DeviceError) as caught:
        library.select_library(libraries, NONE, "fastest")
    assert str(caught.value) == (
        "environment variable MPI_GPUCOMP_HOST_LIBRARY: expected baseline, got 'fastest'. "
        "Set one of these, or unset it to load the best installed build."
    )


def test_a_library_can_be_selected_by_path(libraries: Path, tmp_path: Path) -> None:
    debug = tmp_path / "debug.so"
    debug.touch()
    assert library.select_library(libraries, NONE, str(debug)) == ("file", debug)


def test_a_path_without_a_file_is_an_error(libraries: Path, tmp_path: Path) -> None:
    with pytest.raises(DeviceError) as caught:
        library.select_library(libraries, NONE, str(tmp_path / "debug.so"))
    assert str(caught.value) == (
        f"environment variable MPI_GPUCOMP_HOST_LIBRARY: expected the path of a library, got '{tmp_path}/debug.so', "
        "which is not a file. Correct the path, or unset it to load the best installed build."
    )


def test_a_missing_library_is_an_error_with_instructions(tmp_path: Path) -> None:
    with pytest.raises(DeviceError) as caught:
        library.select_library(tmp_path, NONE)
    assert str(caught.value) == (
        f"host library: expected a library for baseline in {tmp_path}, got none. Install one with "
        "'pip install mpi_gpucomp', or build it with a C++ compiler: 'python mpi_gpucomp/device/build.py'."
    )


def test_cpu_flags_are_read_from_cpuinfo(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu sse2 avx\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert library.cpu_flags(cpuinfo) == {"fpu", "sse2", "avx"}
    cpuinfo.write_text("processor\t: 0\nFeatures\t: asimd\n")
    assert library.cpu_flags(cpuinfo) == NONE
    assert library.cpu_flags(tmp_path / "missing") == NONE


def test_the_loaded_library_is_supported_here() -> None:
    level, path = library.host_library()
    assert level in library.supported_levels(library.cpu_flags())
    assert path.is_file()


def in_new_interpreter(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"from mpi_gpucomp.device import library\n{program}"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_variable_selects_a_level_and_the_log_names_it() -> None:
    done = in_new_interpreter(
        "import logging; logging.basicConfig(level='DEBUG'); print(library.host_library().level)",
        MPI_GPUCOMP_HOST_LIBRARY="baseline",
    )
    path = library.select_library(library.library_directory(), NONE).path
    assert (done.stdout, done.stderr) == ("baseline\n", f"DEBUG:mpi_gpucomp:host library: baseline from {path}\n")


def test_the_variable_selects_a_path() -> None:
    path = library.host_library().path
    done = in_new_interpreter(
        "library.kernel('reduce_f32'); print(*library.host_library())", MPI_GPUCOMP_HOST_LIBRARY=str(path)
    )
    assert done.stdout == f"file {path}\n"


def test_an_invalid_variable_is_an_error_at_first_use() -> None:
    done = in_new_interpreter("library.kernel('reduce_f32')", MPI_GPUCOMP_HOST_LIBRARY="fastest")
    assert "environment variable MPI_GPUCOMP_HOST_LIBRARY: expected " in done.stderr


def test_a_library_that_does_not_load_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "libgpucomp-baseline.so"
    broken.write_bytes(b"this is not a library")
    monkeypatch.setattr(library, "library_directory", lambda: tmp_path)
    with pytest.raises(DeviceError) as caught:
        library._load.__wrapped__()
    text = str(caught.value)
    assert text.startswith(f"host library: expected a loadable library at {broken}, got {broken}: ")
    assert text.endswith(". Rebuild it on this machine: 'python mpi_gpucomp/device/build.py'.")


def test_an_unknown_kernel_is_an_error() -> None:
    with pytest.raises(DeviceError) as caught:
        library.kernel("no_such_kernel")
    assert str(caught.value) == (
        f"kernel no_such_kernel: expected a kernel in {library.host_library().path}, got no such symbol. "
        "If the name is right, the library is older than the kernels: 'python mpi_gpucomp/device/build.py'."
    )


def test_kernels_are_cached() -> None:
    assert library.kernel("reduce_f32") is library.kernel("reduce_f32")


def test_arguments_become_64_bit_integers_and_doubles() -> None:
    values = library.arguments([7, -1, 1 << 47, 0.5, True])
    assert [type(value) for value in values] == [ctypes.c_int64] * 3 + [ctypes.c_double, ctypes.c_int64]
    assert [value.value for value in values] == [7, -1, 1 << 47, 0.5, 1]


def test_arguments_that_are_not_numbers_are_an_error() -> None:
    with pytest.raises(TypeError):
        library.arguments(["7"])  # type: ignore[list-item]


def test_the_logger_is_named_after_the_package() -> None:
    assert library._log is logging.getLogger("mpi_gpucomp")
