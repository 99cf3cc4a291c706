"""The fixture `stream`: every test of a codec that takes it runs on every machine there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hardware import MACHINES
from streams import open_stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi_gpucomp.device import Stream


@pytest.fixture(scope="module", params=MACHINES)
def stream(request: pytest.FixtureRequest) -> Iterator[Stream]:
    """Return a stream on each machine in turn."""
    stream = open_stream(request.param)
    yield stream
    stream.close()
