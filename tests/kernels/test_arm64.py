"""The host library on arm64: it builds without warnings, and writes the same bytes under emulation.

Needs a cross compiler (Debian: g++-aarch64-linux-gnu), and qemu-user.
"""

from __future__ import annotations

import mmap
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from fuzz import COUNTS, SPECS, decode, encode, numbers

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.device import get_device
from mpi_gpucomp.device.base import DTYPES, Memory
from mpi_gpucomp.device.build import build, kernels_directory
from mpi_gpucomp.device.host import HostDevice, InlineStream

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPILER, EMULATOR, SYSROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
HERE = Path(__file__).parent
SHARED_BYTES = 1 << 24


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"there is no {COMPILER} here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", COMPILER)
        (built,) = build(
            kernels_directory(), tmp_path_factory.mktemp("arm64"), extra_flags=["-Werror"], only="baseline"
        )
    return built


class Arm64(HostDevice):
    """An emulated processor: its kernels run in another process, on shared memory."""

    def __init__(self, server: Path, library: Path, spare: Path) -> None:
        file = spare / "memory"
        file.write_bytes(bytes(SHARED_BYTES))
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), SHARED_BYTES)
        self._start = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        self._taken = 0
        command = [EMULATOR, "-L", SYSROOT, server, library, file, str(self._start), str(SHARED_BYTES)]
        self.server = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.expect("ready")

    def expect(self, word: str) -> None:
        assert self.server.stdout is not None
        assert self.server.stdout.readline() == f"{word}\n"

    def alloc(self, nbytes: int) -> Memory:
        """Allocate memory that is unused, or was used longest ago."""
        room = -(-max(nbytes, 1) // 64) * 64
        if self._taken + room > SHARED_BYTES:
            self._taken = 0
        self._taken += room
        return Memory(self._start + self._taken - room, nbytes, self, self._memory)

    pinned = alloc

    def stream(self, *, inline: bool = True) -> Arm64Stream:
        return Arm64Stream(self)


class Arm64Stream(InlineStream):
    device: Arm64

    def launch(self, kernel: str, tiles: int, *args: int | float, split: bool = True, grain: int = 64) -> None:
        whole = [0, tiles, *(int(x) for x in args if not isinstance(x, float))]
        reals = [x.hex() for x in args if isinstance(x, float)]
        self._put(self._queue.work, self._call, f"{kernel} {len(whole)} {whole} {len(reals)} {reals}")

    def _call(self, line: str) -> None:
        assert self.device.server.stdin is not None
        print(line.translate(str.maketrans("[],'", "    ")), file=self.device.server.stdin, flush=True)
        self.device.expect("done")


@pytest.fixture(scope="module")
def arm64(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arm64]:
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"there is no {EMULATOR} here")
    spare = tmp_path_factory.mktemp("server")
    server = spare / "kernel_server"
    subprocess.run([COMPILER, "-O1", "-Wall", HERE / "kernel_server.cpp", "-ldl", "-o", server], check=True)
    device = Arm64(server, library, spare)
    yield device
    with device.server as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0


def test_the_library_builds_without_warnings(library: Path) -> None:
    machine = library.read_bytes()[18:20]
    assert int.from_bytes(machine, "little") == 183  # EM_AARCH64


@pytest.mark.parametrize("spec", SPECS)
def test_both_processors_write_the_same_bytes(arm64: Arm64, spec: str) -> None:
    codec, random = get_codec(spec), np.random.default_rng(0)
    here, there = get_device("host").stream(inline=True), arm64.stream()  # type: ignore[call-arg]
    for dtype, count, _ in product(DTYPES, [*COUNTS, 40000], range(2)):
        if dtype.name not in codec.dtypes:
            continue
        data = numbers(dtype, count, random)
        encoded = encode(codec, data, count, dtype, here)
        assert encode(codec, data, count, dtype, there) == encoded, (dtype.name, count)
        for op in ("replace", "max") if encoded is not None and dtype.kind == "f" else ():
            onto = numbers(dtype, count, random)
            results = [decode(codec, encoded, onto, dtype, op, stream) for stream in (here, there)]
            assert results[0] is not None
            assert results[0] == results[1], (dtype.name, count, op)
