"""The core under sanitizers: many ranks in one process, random schedules, preemption and failures.

`core_driver.cpp` runs the cases that `core_cases.py` draws. `MPI_GPUCOMP_CORE_BATCHES` sets their number.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from core_cases import batches

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "mpi_gpucomp" / "core" / "src"
FLAGS = ["-std=c++17", "-g1", "-pthread", "-Wall", "-Wextra", "-Werror"]
SANITIZERS = {
    "addresses": ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "threads": ["-O0", "-fsanitize=thread"],
}
BATCHES = int(os.environ.get("MPI_GPUCOMP_CORE_BATCHES", "300"))
PATIENCE = 60
"""Seconds after which a batch of cases that has not ended is an error."""
COUNTS = ("failed", "preempted", "in Python", "segmented", "relayed", "lost")


class Planted(NamedTuple):
    """A defect: the source text and its replacement, the sanitizers that notice it, and what is reported."""

    source: str
    original: str
    replacement: str
    sanitizer: str
    report: str


STUCK = "has had no event|does not end"
PLANTED = {
    "too few slots": Planted("task.cpp", "+= DEPTH - AHEAD;", "+= 0;", "addresses", STUCK),
    "no slot for a receive": Planted(
        "task.cpp",
        "lane.wants_slot = lane.arriving.empty();\n    return lane.wants_slot ?",
        "return lane.arriving.empty() ?",
        "addresses",
        STUCK,
    ),
    "early release": Planted(
        "task.cpp", "if (--slot->holders) return;", "--slot->holders;", "addresses", "AddressSanitizer|core_driver"
    ),
    "no wake-up": Planted("context.cpp", "if (sleeping_.load() && write", "if (false && write", "addresses", STUCK),
    "no lock": Planted(
        "loopback_wire.cpp",
        "std::lock_guard<std::mutex> guard(network_.lock_);\n    if (transfer->state == Transfer::PENDING)",
        "if (transfer->state == Transfer::PENDING)",
        "threads",
        "data race",
    ),
    "no order of ops": Planted("task.cpp", "!op->conflicts(before)", "true", "threads", "data race|is .*, not"),
}


def build(directory: Path, sanitizer: str, sources: Path = SOURCES) -> Path:
    """Compile the core and its driver."""
    command = [*shlex.split(os.environ.get("CXX", "c++")), *FLAGS, *SANITIZERS[sanitizer], f"-I{sources}"]
    directory.mkdir(exist_ok=True)

    def run(*arguments: str) -> None:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        if re.search(r"cannot find .*(lib)?[at]san", done.stderr):
            pytest.skip(f"the compiler comes without {sanitizer} sanitizers")
        assert done.returncode == 0, done.stderr[:6000]

    # The TCP wire has tests of its own.
    core = [unit for unit in sorted(sources.glob("*.cpp")) if not unit.name.startswith("tcp_")]
    units = [HERE / "core_driver.cpp", *core]
    parts = {unit: str(directory / f"{unit.stem}.o") for unit in units}
    with ThreadPoolExecutor(os.cpu_count() or 1) as jobs:
        list(jobs.map(lambda unit: run("-c", str(unit), "-o", parts[unit]), units))
    driver = directory / "driver"
    run(*parts.values(), "-o", str(driver))
    return driver


def drive(driver: Path, first: int, count: int, patience: int = PATIENCE) -> subprocess.CompletedProcess[str]:
    """Run the batches of some seeds."""
    cases = driver.with_suffix(".cases")
    with cases.open("wb") as file:
        for numbers in batches(first, count):
            file.write(numbers.tobytes())
    environment = os.environ | {"UBSAN_OPTIONS": "print_stacktrace=1", "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run(
        [driver, cases, str(patience)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=10 * patience + count,
        check=False,
    )


@pytest.mark.parametrize(
    "sanitizer", [name if name == "addresses" else pytest.param(name, marks=pytest.mark.slow) for name in SANITIZERS]
)
def test_the_core_under_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    done = drive(build(tmp_path, sanitizer), 0, BATCHES)
    assert (done.returncode, done.stderr[:6000]) == (0, "")
    for what in COUNTS:
        assert re.search(rf"\b[1-9]\d* {what}\b", done.stdout), f"{done.stdout}: no case is {what}"


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_planted_defects_are_detected(planted: Planted, tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(SOURCES, sources)
    text = (sources / planted.source).read_text()
    assert planted.original in text
    (sources / planted.source).write_text(text.replace(planted.original, planted.replacement))
    done = drive(build(tmp_path / "built", planted.sanitizer, sources), 0, 300, patience=25)
    assert done.returncode != 0, done.stdout
    assert re.search(planted.report, done.stderr), done.stderr[:6000]
