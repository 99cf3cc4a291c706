"""The interpreter of PTX: mistakes in kernels are found, and all kernels of the library give the bytes of the host.

The kernels are compiled by NVRTC, which needs no GPU. The seed of lanes and warps differs from run to run and is
printed, as in test_conformance.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpi_gpucomp.device.build import kernels_directory
from mpi_gpucomp.device.library import OPTIONS
from simulated_cuda import SETTINGS, CudaError, machine
from simulated_cuda.build import kernel_layouts
from simulated_cuda.mutant import VARIABLE
from simulated_cuda.program import Program

pytestmark = pytest.mark.skipif(SETTINGS in os.environ, reason="these tests start the machine again: others use it")
ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = [75, 80, 90, 100, 120]
SEEDS = range(4)
TILES = 12
COMPARED = "ptx=4096,compare=1"


@pytest.fixture(params=SEEDS)
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    """Return a program on a machine that interprets kernels."""
    made = machine()
    made.configure(f"seed={request.param},ptx=64,background=0")
    yield Program(made)
    made.configure("")


@pytest.fixture(scope="module")
def nvrtc() -> Any:
    return pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC comes with CuPy", exc_type=ImportError)


def compiled(nvrtc: Any, source: str, kernels: Path | None = None) -> bytes:
    """Return the PTX of a kernel that is written with the constructs of simt.h."""
    made = nvrtc.createProgram('#include "simt.h"\n' + source, "test.cu", (), ())
    nvrtc.compileProgram(made, (*OPTIONS, "-arch=compute_80", f"-I{kernels or kernels_directory()}"))
    return bytes(nvrtc.getPTX(made))


WORDS = np.arange(32 * TILES, dtype=np.uint32)
MIRRORED = """
KERNEL(mirror, const u32 *from, u32 *to) {
    WARP_SHARED(u32, words, 32);
    FOR_TILES(t) {
        FOR_LANES(l) words[l] = from[32 * t + l];
        warp_sync();
        FOR_LANES(l) to[32 * t + l] = words[31 - l];
        warp_sync();
    }
}
"""
SUM = """
KERNEL(last_sum, const u32 *from, u64 *sums, u64 *done, u64 tiles, u64 *to) {
    u64 mine = 0;
    FOR_TILES(t) {
        Lane<u32> x;
        FOR_LANES(l) x[l] = from[32 * t + l];
        const u32 sum = reduce_sum(x);
        ONE_LANE sums[t] = sum;
        ++mine;
    }
    if (!last_warp(done, mine, tiles)) return;
    ONE_LANE {
        u64 all = 0;
        for (u64 t = 0; t < tiles; ++t) all += sums[t];
        *to = all;
    }
}
"""


def run_mirror(program: Program, image: bytes, count: int = 32 * TILES) -> np.ndarray:
    source, to = program.put(WORDS[:count].tobytes()), program.alloc(WORDS.nbytes)
    program.launch("mirror", None, TILES, source, to, module=program.module(image))
    return np.frombuffer(program.bytes_at(to, WORDS.nbytes), np.uint32)


def run_sum(program: Program, image: bytes) -> int:
    source, zeros = program.put(WORDS.tobytes()), program.put(bytes(8 * TILES + 16))
    at = (source, zeros + 16, zeros, TILES, zeros + 8)
    program.launch("last_sum", None, TILES, *at, module=program.module(image))
    return int.from_bytes(program.bytes_at(zeros + 8, 8), "little")


def test_right_kernels_give_what_they_should(program: Program, nvrtc: Any) -> None:
    expected = WORDS.reshape(TILES, 32)[:, ::-1].ravel()
    assert (run_mirror(program, compiled(nvrtc, MIRRORED)) == expected).all()
    assert run_sum(program, compiled(nvrtc, SUM)) == WORDS.sum()
    assert program.machine.findings == []
    profile = program.machine.profiles["mirror"]
    assert (profile["launches"], profile["load_bytes"], profile["store_bytes"]) == (1, WORDS.nbytes, WORDS.nbytes)
    # Each warp reads 128 bytes: four sectors.
    assert (profile["loads"], profile["load_sectors"]) == (TILES, 4 * TILES)


FOURS = """
#include "reduce.h"
KERNEL(fours, const f32 *from, f32 *to, i64 count) {
    FOR_TILES(t) {
        Lane<f32> x[4];
        FOR_LANES(l) UNROLL for (int j = 0; j < 4; ++j) x[j][l] = from[128 * t + 4 * l + j];
        store_lanes(to, 128 * t, count, x, SUM);
    }
}
"""


@pytest.mark.parametrize(("shift", "stores"), [(0, 1), (1, 4)])
def test_adjacent_elements_are_stored_at_once_where_they_are_aligned(
    program: Program, nvrtc: Any, shift: int, stores: int
) -> None:
    count = 128 * TILES
    values = np.arange(count, dtype=np.float32)
    source, to = program.put(values.tobytes()), program.put(np.ones(count + shift, np.float32).tobytes())
    program.launch("fours", None, TILES, source, to + 4 * shift, count, module=program.module(compiled(nvrtc, FOURS)))
    found = np.frombuffer(program.bytes_at(to, 4 * (count + shift)), np.float32)
    assert (found[:shift] == 1).all()
    assert (found[shift:] == values + 1).all()
    assert program.machine.findings == []
    assert program.machine.profiles["fours"]["stores"] == stores * TILES


MISTAKES = {
    "nothing orders the lanes": ("warp_sync();", "", "race in shared memory: lane .* what another thread"),
    "an index behind the end": ("from[32 * t + l]", "from[32 * t + l + 1]", "lane 31 reads 4 bytes"),
    "a misaligned address": ("from[32 * t + l]", "(u32)(*(const u64 *)(from + 1) % 7)", "not aligned"),
    "shared memory that nobody wrote": ("words[l] =", "if (l) words[l] =", "lane 31 writes an undefined value"),
    "shared memory behind its end": ("words[31 - l]", "words[160 - l]", "of shared memory"),
    "a branch on what nobody wrote": ("words[l] =", "if (words[l] & 1) words[l] =", "undefined value decides"),
    "two warps write one word": ("to[32 * t + l]", "to[l]", "race in global memory: lane .* writes"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(program: Program, nvrtc: Any, mistake: str) -> None:
    old, new, pattern = MISTAKES[mistake]
    assert old in MIRRORED
    with suppress(CudaError):
        run_mirror(program, compiled(nvrtc, MIRRORED.replace(old, new, 1)))
    assert re.search(pattern, "\n".join(program.machine.findings)), program.machine.findings


def test_lanes_that_are_elsewhere_are_found(program: Program, nvrtc: Any) -> None:
    half = "u32 sum = 0; FOR_LANES(l) if (l < 16) sum = reduce_sum(x);"
    with pytest.raises(CudaError) as caught:
        run_sum(program, compiled(nvrtc, SUM.replace("const u32 sum = reduce_sum(x);", half)))
    assert caught.value.code == 719
    assert re.search("the instruction names|wait for ever", program.machine.findings[0])


def test_a_warp_that_reads_without_a_fence_is_found(program: Program, nvrtc: Any, tmp_path: Path) -> None:
    shutil.copytree(kernels_directory(), tmp_path / "kernels")
    header = tmp_path / "kernels" / "simt_cuda.h"
    header.write_text(header.read_text().replace("__threadfence();", ""))
    run_sum(program, compiled(nvrtc, SUM, tmp_path / "kernels"))
    assert re.search("race in global memory: lane 0 reads", "\n".join(program.machine.findings))


def test_what_the_interpreter_does_not_know_is_an_error(program: Program) -> None:
    text = ".version 9.4\n.target sm_80\n.address_size 64\n.visible .entry odd(\n)\n{\n\tfma.approx.f32 \t%f1;\n}\n"
    with pytest.raises(CudaError) as caught:
        program.module(text.encode())
    assert caught.value.code == 218
    assert "expected PTX as NVRTC writes it for these kernels, got" in program.machine.findings[0]


# The kernels of the library.


def every_kernel(settings: str, *counts: int, mutant: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Launch every kernel on arrays of these lengths, interpreted and compared with the host's, in another process."""
    command = [sys.executable, "-m", "tests.simulated_cuda.every_kernel", *map(str, counts)]
    environment = os.environ | {SETTINGS: settings} | ({VARIABLE: str(mutant)} if mutant else {})
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def entry_points() -> set[str]:
    """Return the names of all kernels in `kernels/`."""
    return {name for source in kernels_directory().glob("*.cu") for name in kernel_layouts(source)}


def check_every_kernel(architecture: int, *counts: int) -> None:
    """Check that no entry point is left out, and that each writes the bytes that the host's kernel writes."""
    settings = f"seed={int.from_bytes(os.urandom(3), 'little')},{COMPARED},capability={architecture}"
    done = every_kernel(settings, *counts)
    assert (done.returncode, done.stderr.strip()) == (0, ""), f"{SETTINGS}={settings}\n{done.stderr[-6000:]}"
    assert set(done.stdout.split()) == entry_points()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_writes_the_bytes_of_the_host(nvrtc: Any, architecture: int) -> None:
    check_every_kernel(architecture, 300, 5003)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_writes_the_bytes_of_the_host_for_long_arrays(nvrtc: Any, architecture: int) -> None:
    check_every_kernel(architecture, 70_001)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tests_of_kernels_pass(nvrtc: Any, architecture: int) -> None:
    paths = ["tests/kernels", "tests/golden", "tests/unit/test_packing.py", "tests/unit/test_frame.py"]
    settings = f"seed={int.from_bytes(os.urandom(3), 'little')},{COMPARED},capability={architecture}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-k", "cuda or gpu"]
    environment = os.environ | {SETTINGS: settings, "PYTEST_ADDOPTS": ""}
    done = subprocess.run([*command, *paths], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    passed = re.search(r"^(\d+) passed(?!.*(failed|error))", done.stdout, re.MULTILINE)
    assert passed, f"{SETTINGS}={settings}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"
    assert int(passed[1]) >= 700


SIMT = "simt_cuda.h"
MUTANTS = {
    "warp_sync": (SIMT, "void warp_sync() { __syncwarp(); }", "void warp_sync() {}", "a race in"),
    "block_sync": (SIMT, "void block_sync() { __syncthreads(); }", "void block_sync() {}", "a race in shared memory"),
    "mask": (SIMT, "all += __shfl_xor_sync(ALL_LANES,", "all += __shfl_xor_sync(0x7fffffffu,", "names 7fffffff"),
    "fence": (SIMT, "__threadfence();", "", "a race in global memory"),
    "lanes": (SIMT, "? below : first", "? below : below", "bytes differ from the host's"),
    "stride": (SIMT, "gridDim.x * WARPS_PER_BLOCK)", "gridDim.x * WARPS_PER_BLOCK - 1)", "a race in|differ"),
    "index": ("zfp.cu", "words[(at >> 5) + 1]", "words[(at >> 5) + 2]", "bytes differ from the host's|behind|writes"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutation_of_the_kernels_is_found(nvrtc: Any, tmp_path: Path, name: str) -> None:
    file, old, new, pattern = MUTANTS[name]
    shutil.copytree(kernels_directory(), tmp_path / "kernels")
    path = tmp_path / "kernels" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    done = every_kernel(f"seed=1,{COMPARED}", 5003, mutant=tmp_path / "kernels")
    assert done.returncode != 0
    assert re.search(rf"ptx: .*({pattern})", done.stderr), done.stderr[-4000:]
