"""Collectives over the shared-memory wire, without MPI."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tcp_rank import ThreadBootstrap, ThreadGroup

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from running import Ranks, expected

from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.transport.shm import ShmWire


@pytest.mark.parametrize("single_copy", [False, True])
@pytest.mark.parametrize(("collective", "name"), [("broadcast", "chain"), ("allreduce", "ring"), ("alltoall", "bruck")])
def test_collectives(collective: str, name: str, single_copy: bool) -> None:
    size, group = 3, ThreadGroup(3)

    def make(rank: int) -> ShmWire:
        return ShmWire(ThreadBootstrap(group, rank), single_copy=single_copy)

    with ThreadPoolExecutor(size) as threads:
        wires = list(threads.map(make, range(size)))
        run = Ranks(build(collective, name, size), 120_000, "split", "float32", network=wires, chunk=30_000)
        run.drive()
        for rank, output in enumerate(run.outputs):
            assert np.array_equal(output, expected(collective, run.inputs, rank, 0, "sum"))
        list(threads.map(ShmWire.close, wires))
