"""The fixture `machine`: every test that takes it runs on every machine there is."""

from __future__ import annotations

import pytest
from hardware import GPU, MACHINES
from machines import Gpu, Host, Machine, fresh_library


@pytest.fixture(scope="session", params=MACHINES)
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    level: str = request.param
    return Gpu() if level == GPU else Host(level, fresh_library(level, tmp_path_factory.mktemp("library")))
