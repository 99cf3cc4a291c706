"""The fixture `machine`: every test that takes it runs on every machine there is."""

from __future__ import annotations

import pytest
from machines import Gpu, Host, Machine, fresh_library

from mpi_gpucomp.device.build import LIBRARIES
from mpi_gpucomp.device.library import processor_flags, runnable
from mpi_gpucomp.errors import DeviceError


@pytest.fixture(scope="session", params=[*LIBRARIES, "cuda"])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    level: str = request.param
    if level == "cuda":
        try:
            return Gpu()
        except DeviceError as error:
            pytest.skip(str(error))
    if level not in runnable(processor_flags()):
        pytest.skip(f"this processor does not run {level}")
    return Host(level, fresh_library(level, tmp_path_factory.mktemp("library")))
