"""What all tests share: the devices of this machine, and a second MPI."""

from __future__ import annotations

import pytest
from hypothesis import settings
from mpich import mpich

from mpi_gpucomp.device import Device, get_device
from mpi_gpucomp.errors import DeviceError

__all__ = ["device", "device_or_skip", "gpu", "host", "mpich"]

# No test asserts a time: the machine may be shared and busy.
settings.register_profile("patient")
settings.load_profile("patient")


def device_or_skip(name: str) -> Device:
    """Return the device, or skip the test and say why."""
    try:
        return get_device(name)
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture
def host() -> Device:
    """Return the processor."""
    return get_device("host")


@pytest.fixture
def gpu() -> Device:
    """Return the first GPU."""
    return device_or_skip("cuda:0")


@pytest.fixture(params=["host", "cuda:0"])
def device(request: pytest.FixtureRequest) -> Device:
    """Return each kind of device in turn."""
    return device_or_skip(request.param)
