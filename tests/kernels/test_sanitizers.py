"""No out-of-bounds access by kernels, whatever the stream: `fuzz.py` under sanitizers and with guard pages.

The host library is fuzzed twice: built with the address and undefined-behaviour sanitizers, and as shipped, with guard
pages around its memory. `MPI_GPUCOMP_FUZZ_ROUNDS` sets the number of rounds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hardware import HOSTS

from mpi_gpucomp.device.build import build, kernels_directory
from mpi_gpucomp.device.library import VARIABLE

if TYPE_CHECKING:
    from machines import Host

HERE = Path(__file__).parent
ROUNDS = int(os.environ.get("MPI_GPUCOMP_FUZZ_ROUNDS", "3"))
SECONDS_A_ROUND = 60
SEED = 1

# Not optimised: it compiles many times faster, and no defect is optimised away.
SANITIZERS = ["-O0", "-g1", "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]


class Planted(NamedTuple):
    """A defect: the codec that triggers it, the source text and its replacement, and the sanitizer's report."""

    codec: str
    family: str
    original: str
    replacement: str
    report: str


PLANTED = {
    "read": Planted("mpc", "mpc.cu", "if (size < 4 * BLOCKS * N) return false;", "", "heap-buffer-overflow"),
    "write": Planted("mpc", "reduce.h", "if (start + N * l + j < count) Onto", "Onto", "heap-buffer-overflow"),
    "shift": Planted("zfp:rate=32", "zfp.cu", "bits ? length : 0", "length", "shift exponent"),
}


def runtimes() -> list[str]:
    """Return the sanitizers' runtime libraries, which must be loaded first."""
    compiler = os.environ.get("CXX", "c++").split()
    names = ("libasan.so", "libubsan.so")
    paths = [
        subprocess.run(
            [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in names
    ]
    if missing := [name for name, path in zip(names, paths, strict=True) if not Path(path).is_file()]:
        pytest.skip(f"the compiler {compiler[0]} comes without {' and '.join(missing)}")
    return paths


def fuzz(
    library: str | Path, memory: str, rounds: int, preload: list[str], *codecs: str
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        VARIABLE: str(library),
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "MPI_GPUCOMP_WORKERS": "3",
        "PYTHONPATH": str(HERE.parents[1]),
    }
    return subprocess.run(
        [sys.executable, str(HERE / "fuzz.py"), memory, str(rounds), str(SEED), *codecs],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_A_ROUND * (1 + rounds),
        check=False,
    )


def check_clean(done: subprocess.CompletedProcess[str]) -> None:
    last = done.stdout.splitlines()[-1:]
    assert (done.returncode, last) == (0, ["done"]), f"{last}\n{done.stderr[:6000]}"


@pytest.mark.parametrize("level", HOSTS)
def test_the_library_under_sanitizers(level: str, tmp_path: Path) -> None:
    preload = runtimes()
    (library,) = build(kernels_directory(), tmp_path, extra_flags=SANITIZERS, only=level)
    check_clean(fuzz(library, "heap", ROUNDS, preload))


@pytest.mark.parametrize("machine", HOSTS, indirect=True)
def test_the_library_as_it_is_shipped(machine: Host) -> None:
    check_clean(fuzz(machine.library._name, "pages", 3 * ROUNDS, []))


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_planted_defects_are_detected(planted: Planted, tmp_path: Path) -> None:
    """A kernel with one check removed fails."""
    preload, kernels = runtimes(), tmp_path / "kernels"
    others = {"mpc.cu", "tiles.cu", planted.family} if planted.codec == "mpc" else {planted.family}
    kernels.mkdir()
    for text in [*kernels_directory().glob("*.h"), *(kernels_directory() / name for name in others)]:
        shutil.copy(text, kernels)
    text = (kernels / planted.family).read_text()
    assert text.count(planted.original) == 1
    (kernels / planted.family).write_text(text.replace(planted.original, planted.replacement))
    (library,) = build(kernels, tmp_path, extra_flags=SANITIZERS, only="baseline")
    done = fuzz(library, "heap", ROUNDS, preload, planted.codec)
    assert done.returncode != 0, done.stdout[-300:]
    assert planted.report in done.stderr
    assert f"{planted.family}:" in done.stderr


def test_guard_pages_detect_reads_past_the_end() -> None:
    """A read past the end of guarded memory fails."""
    program = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import ctypes
from guarded import GuardedDevice, Pages
memory = GuardedDevice(Pages()).alloc(4100)
ctypes.string_at(memory.address, 4100)
print("inside", flush=True)
ctypes.string_at(memory.address, 4101)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=HERE.parents[1], timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (-11, "inside\n"), done.stderr
