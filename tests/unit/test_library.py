"""Which host library is loaded, and what is said when none can be."""

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
def test_the_most_demanding_library_that_runs_is_chosen(libraries: Path, flags: frozenset[str], level: str) -> None:
    assert library.choose(libraries, flags) == (level, libraries / f"libgpucomp-{level}.so")


@on_x86
def test_a_library_that_is_not_there_falls_to_the_next(libraries: Path) -> None:
    for level in ("x86-64-v4", "x86-64-v3"):
        (libraries / f"libgpucomp-{level}.so").unlink()
        assert library.choose(libraries, V4).level != level
    assert library.choose(libraries, V4).level == "baseline"


@on_x86
@pytest.mark.parametrize("level", list(LIBRARIES))
def test_one_can_be_forced(libraries: Path, level: str) -> None:
    assert library.choose(libraries, V4, level).level == level


@on_x86
def test_forcing_what_the_processor_cannot_run_is_an_error(libraries: Path) -> None:
    with pytest.raises(DeviceError) as caught:
        library.choose(libraries, V3, "x86-64-v4")
    assert str(caught.value) == (
        "environment variable MPI_GPUCOMP_HOST_LIBRARY: expected x86-64-v3 or baseline, got x86-64-v4, which this "
        "processor does not run. Choose one of these, or unset it to get the best."
    )


def test_forcing_what_does_not_exist_is_an_error(libraries: Path) -> None:
    with pytest.raises(DeviceError) as caught:
        library.choose(libraries, NONE, "fastest")
    assert str(caught.value) == (
        "environment variable MPI_GPUCOMP_HOST_LIBRARY: expected baseline, got 'fastest'. "
        "Choose one of these, or unset it to get the best."
    )


def test_a_path_forces_that_file(libraries: Path, tmp_path: Path) -> None:
    debug = tmp_path / "debug.so"
    debug.touch()
    assert library.choose(libraries, NONE, str(debug)) == ("file", debug)


def test_a_path_where_there_is_no_file_is_an_error(libraries: Path, tmp_path: Path) -> None:
    with pytest.raises(DeviceError) as caught:
        library.choose(libraries, NONE, str(tmp_path / "debug.so"))
    assert str(caught.value) == (
        f"environment variable MPI_GPUCOMP_HOST_LIBRARY: expected the path of a library, got '{tmp_path}/debug.so', "
        "where there is no file. Correct the path, or unset it to get the best library that is installed."
    )


def test_no_library_at_all_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(DeviceError) as caught:
        library.choose(tmp_path, NONE)
    assert str(caught.value) == (
        f"host library: expected a library for baseline in {tmp_path}, got none. Install one with "
        "'pip install mpi_gpucomp', or build it with a C++ compiler: 'python mpi_gpucomp/device/build.py'."
    )


def test_the_processors_flags_are_read_where_the_system_tells(tmp_path: Path) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text("processor\t: 0\nflags\t\t: fpu sse2 avx\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert library.processor_flags(told) == {"fpu", "sse2", "avx"}
    told.write_text("processor\t: 0\nFeatures\t: asimd\n")
    assert library.processor_flags(told) == NONE
    assert library.processor_flags(tmp_path / "nothing") == NONE


def test_the_loaded_library_is_one_that_runs_here() -> None:
    level, path = library.loaded()
    assert level in library.runnable(library.processor_flags())
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


def test_the_environment_forces_one_and_the_log_tells() -> None:
    done = in_new_interpreter(
        "import logging; logging.basicConfig(level='DEBUG'); print(library.loaded().level)",
        MPI_GPUCOMP_HOST_LIBRARY="baseline",
    )
    path = library.choose(library.library_directory(), NONE).path
    assert (done.stdout, done.stderr) == ("baseline\n", f"DEBUG:mpi_gpucomp:host library: baseline from {path}\n")


def test_the_environment_forces_a_path() -> None:
    path = library.loaded().path
    done = in_new_interpreter(
        "library.kernel('reduce_f32'); print(*library.loaded())", MPI_GPUCOMP_HOST_LIBRARY=str(path)
    )
    assert done.stdout == f"file {path}\n"


def test_a_wrong_word_in_the_environment_is_an_error_at_first_use() -> None:
    done = in_new_interpreter("library.kernel('reduce_f32')", MPI_GPUCOMP_HOST_LIBRARY="fastest")
    assert "environment variable MPI_GPUCOMP_HOST_LIBRARY: expected " in done.stderr


def test_a_broken_library_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "libgpucomp-baseline.so"
    broken.write_bytes(b"this is no library")
    monkeypatch.setattr(library, "library_directory", lambda: tmp_path)
    with pytest.raises(DeviceError) as caught:
        library._library.__wrapped__()
    text = str(caught.value)
    assert text.startswith(f"host library: expected a library that loads at {broken}, got {broken}: ")
    assert text.endswith(". Build it again on this machine: 'python mpi_gpucomp/device/build.py'.")


def test_an_unknown_kernel_is_an_error() -> None:
    with pytest.raises(DeviceError) as caught:
        library.kernel("no_such_kernel")
    assert str(caught.value) == (
        f"kernel no_such_kernel: expected a kernel in {library.loaded().path}, got no such name there. If the name is "
        "right, the library is older than the kernels: 'python mpi_gpucomp/device/build.py'."
    )


def test_a_kernel_is_found_once() -> None:
    assert library.kernel("reduce_f32") is library.kernel("reduce_f32")


def test_numbers_become_what_kernels_take() -> None:
    values = library.arguments([7, -1, 1 << 47, 0.5, True])
    assert [type(value) for value in values] == [ctypes.c_int64] * 3 + [ctypes.c_double, ctypes.c_int64]
    assert [value.value for value in values] == [7, -1, 1 << 47, 0.5, 1]


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError):
        library.arguments(["7"])  # type: ignore[list-item]


def test_logging_goes_to_one_name() -> None:
    assert library._log is logging.getLogger("mpi_gpucomp")
