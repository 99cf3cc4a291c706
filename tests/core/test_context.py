"""The context of a wire, as Python makes it."""

from __future__ import annotations

import resource

import pytest

from mpi_gpucomp.core.library import core
from mpi_gpucomp.core.wire import Wire


def test_a_process_that_may_open_no_more_files() -> None:
    """It gets an error; a context without descriptors would never run."""
    network = core().gc_loopback_new(1, 0, 0, 0)
    wire = core().gc_loopback_wire(network, 0)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files: 'a communicator'"):
            Wire(wire, 0, 1, 100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        core().gc_wire_free(wire)
