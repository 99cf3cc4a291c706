"""What all tests share: the devices of this machine, the hardware that tests need, and a second MPI."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hardware import (
    GPU,
    SIMULATED,
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_report_header,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)
from hypothesis import settings
from mpich import any_mpi, mpich

from mpi_gpucomp.device import Device, get_device

__all__ = [
    "any_mpi",
    "device",
    "gpu",
    "host",
    "mpich",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_report_header",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "pytest_testnodedown",
]

# A shell's background jobs ignore Ctrl-C, and so would every program that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test asserts a time: the machine may be shared and busy.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def _no_findings() -> Iterator[None]:
    """Fail a test in which the simulated CUDA machine found something, if GPUs are simulated."""
    yield
    if SIMULATED is not None:
        SIMULATED.repair()
        SIMULATED.check()


@pytest.fixture
def host() -> Device:
    """Return the processor."""
    return get_device("host")


@pytest.fixture
def gpu() -> Device:
    """Return the first GPU."""
    return get_device(GPU)


@pytest.fixture(params=["host", pytest.param(GPU, marks=pytest.mark.needs(GPU))])
def device(request: pytest.FixtureRequest) -> Device:
    """Return each kind of device in turn."""
    return get_device(request.param)
