"""The shared-memory wire: `test_shm.cpp` as shipped, and under the sanitizers of addresses, behaviour and threads."""

from __future__ import annotations

import os
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "mpi_gpucomp" / "core" / "src"
FLAGS = ["-std=c++17", "-g1", "-pthread", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", f"-I{SOURCES}"]
BUILDS = {
    "shipped": ["-O1"],
    "addresses": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "threads": ["-O1", "-fsanitize=thread"],
}
KINDS = [
    ("shipped", "processes"),
    ("shipped", "threads"),
    pytest.param("addresses", "processes", marks=pytest.mark.slow),
    pytest.param("addresses", "threads", marks=pytest.mark.slow),
    # The sanitizer of threads does not see other processes.
    pytest.param("threads", "threads", marks=pytest.mark.slow),
]
SECONDS = 150

of_both_kinds = pytest.mark.parametrize(("program", "kind"), KINDS, indirect=["program"])
of_processes = pytest.mark.parametrize(
    "program", ["shipped", pytest.param("addresses", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Remember the programs that were built."""
    return {"directory": tmp_path_factory.mktemp("shm")}


@pytest.fixture
def program(request: pytest.FixtureRequest, programs: dict[str, Path]) -> Path:
    """Build the cases, once with each sanitizer."""
    name: str = request.param
    if name not in programs:
        if name != "shipped" and not supports(BUILDS[name][1]):
            pytest.skip(f"the compiler comes without {BUILDS[name][1]}")
        target = programs["directory"] / name
        files = [HERE / "test_shm.cpp", SOURCES / "shm_wire.cpp", SOURCES / "shm_peers.cpp"]
        compile_program([*FLAGS, *BUILDS[name], *map(str, files)], target)
        programs[name] = target
    return programs[name]


@cache
def supports(flag: str) -> bool:
    """Return True if the compiler has the runtime library of a sanitizer."""
    command = [*compiler(), flag, "-x", "c++", "-", "-o", os.devnull]
    return subprocess.run(command, input="int main() {}", text=True, capture_output=True, check=False).returncode == 0


def compiler() -> list[str]:
    """Return the C++ compiler."""
    return shlex.split(os.environ.get("CXX", "c++"))


def compile_program(arguments: list[str], target: Path) -> None:
    """Compile without a warning."""
    done = subprocess.run([*compiler(), *arguments, "-o", str(target)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def check(program: Path, directory: Path, *arguments: object) -> None:
    """Run a case; it must pass, leave no file behind and no sanitizer may report anything."""
    command = [str(program), str(directory), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "passed\n", ""), done.stdout + done.stderr[:4000]
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("single_copy", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@of_both_kinds
def test_random_messages(program: Path, tmp_path: Path, kind: str, ranks: int, single_copy: int) -> None:
    for seed, ring_bytes in enumerate((16 << 10, 64 << 10, 0)):
        check(program, tmp_path, "traffic", kind, ranks, ring_bytes, single_copy, 10 * ranks + seed)


@pytest.mark.parametrize("case", ["contract", "ping_pong", "left", "abandoned"])
@of_both_kinds
def test_both_paths(program: Path, tmp_path: Path, kind: str, case: str) -> None:
    for single_copy in (0, 1):
        check(program, tmp_path, case, kind, 2, 64 << 10, single_copy, 1)


@pytest.mark.parametrize("ranks", [2, 5])
@of_both_kinds
def test_ranks_learn_why_another_fails(program: Path, tmp_path: Path, kind: str, ranks: int) -> None:
    check(program, tmp_path, "revoked", kind, ranks, 0, 1, 1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("single_copy", [0, 1])
@of_processes
def test_a_killed_rank(program: Path, tmp_path: Path, single_copy: int, seed: int) -> None:
    """With an odd seed, a child of the killed rank lives on and holds its connections."""
    check(program, tmp_path, "killed", "processes", 3, 64 << 10, single_copy, seed)


@pytest.mark.parametrize("case", ["bootstrap", "forked", "namespaces", "corrupt"])
@of_processes
def test_processes(program: Path, tmp_path: Path, case: str) -> None:
    check(program, tmp_path, case)
