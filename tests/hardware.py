"""The hardware that tests need: `MACHINES` that run kernels, and what becomes of tests for those that are missing.

A test of the whole matrix exists once for each machine. Those for a machine that is not here are deselected when they
are collected, and the summary counts them in one line for each machine. `--gpu` runs those that need a GPU in any case.
If the environment variable `MPI_GPUCOMP_SIMULATED_CUDA` is set, GPUs are simulated, with the settings that it has.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
from simulated_cuda import SETTINGS, Machine, machine
from simulated_cuda.cupy_standin import install

from mpi_gpucomp.device import get_device
from mpi_gpucomp.device.build import LIBRARIES
from mpi_gpucomp.device.library import cpu_flags, supported_levels
from mpi_gpucomp.errors import DeviceError

GPU = "cuda:0"
NVCOMP = "nvCOMP on a real GPU"
"""What tests of its codecs on a GPU need: nvCOMP does not run on a simulated one."""
NVCOMP_TESTS = re.compile(
    r"test_nvcomp|test_codecs_on_a_gpu|\[.*\b(lz4|snappy|zstd|deflate|gdeflate|ans|bitcomp|cascaded)\b"
)
GPU_FIXTURES = {"gpu"}
"""Fixtures that are a GPU or a stream of one: tests that use them need one without a marker of their own."""
SIMULATED: Machine | None = None
"""The simulated CUDA machine, if GPUs are simulated."""
DESELECTED = pytest.StashKey[dict[str, int]]()

HOSTS = [pytest.param(level, marks=pytest.mark.needs(level)) for level in LIBRARIES]
"""The host library at each instruction set."""
MACHINES = [*HOSTS, pytest.param(GPU, marks=pytest.mark.needs(GPU))]
"""All machines that run kernels, as parameters of a test or a fixture."""

if SETTINGS in os.environ:
    install()
    SIMULATED = machine()


@cache
def missing(machine: str) -> str:
    """Return why a machine cannot be used here, or an empty string."""
    if machine == NVCOMP:
        return "GPUs are simulated"
    if machine in LIBRARIES:
        return "" if machine in supported_levels(cpu_flags()) else f"this processor does not support {machine}"
    try:
        get_device(machine)
    except DeviceError as error:
        return " ".join(error.got.split())
    return ""


def needed(item: pytest.Item) -> str | None:
    """Return the machine that a test needs, if it needs a particular one."""
    marker = item.get_closest_marker("needs")
    machine: str | None = marker.args[0] if marker else None
    if GPU_FIXTURES & set(getattr(item, "fixturenames", ())):
        machine = GPU
    return NVCOMP if machine == GPU and SIMULATED is not None and NVCOMP_TESTS.search(item.nodeid) else machine


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --gpu."""
    parser.addoption("--gpu", action="store_true", help="run the tests that need a GPU: without one they fail")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "needs(machine): run on this machine alone, such as cuda:0")


def pytest_report_header() -> list[str]:
    """Name the settings of simulated GPUs, so that a failure can be repeated."""
    return [f"simulated GPUs: {SETTINGS}={os.environ[SETTINGS]}"] if SIMULATED is not None else []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that need what is not here, behind -k and -m, so that the count is that of tests not run."""
    forced = {GPU} if config.getoption("--gpu") else set()
    kept: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    counts: Counter[str] = Counter()
    for item in items:
        machine = needed(item)
        if machine is None or machine in forced or not missing(machine):
            kept.append(item)
        else:
            deselected.append(item)
            counts[machine] += 1
    config.stash[DESELECTED] = dict(counts)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = kept


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the counts of a worker of pytest-xdist to its controller."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["deselected"] = session.config.stash.get(DESELECTED, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of a worker: all workers collect the same tests."""
    counts = getattr(node, "workeroutput", {}).get("deselected")
    if counts is not None:
        node.config.stash[DESELECTED] = counts


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write one line for each missing machine."""
    for needed_machine, count in config.stash.get(DESELECTED, {}).items():
        what = "a GPU; none found" if needed_machine == GPU else needed_machine
        tests = "1 test needs" if count == 1 else f"{count} tests need"
        terminalreporter.write_line(f"{tests} {what}: {missing(needed_machine)}")
