"""A rank of a job without MPI: collectives over sockets, whose addresses are exchanged through files.

`test_no_mpi.py` starts it, with its directory, rank and number of ranks.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.core.library import core
from mpi_gpucomp.core.wire import Wire
from mpi_gpucomp.device import as_buffer, get_device
from mpi_gpucomp.engine.coder import Coder
from mpi_gpucomp.engine.engine import Engine
from mpi_gpucomp.engine.program import Blocks, Layout
from mpi_gpucomp.engine.progress import ProgressDriver
from mpi_gpucomp.engine.scheduling import Job
from mpi_gpucomp.engine.task import CollectiveTask
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.transport.rails import Rails
from mpi_gpucomp.transport.rails.connections import TcpConnections

COUNT, CHUNK, LARGEST_TAG = 300_000, 40_000, (1 << 31) - 1


class FileBootstrap:
    """Ranks that share a directory."""

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._directory, self._rounds = directory, 0

    def allgather(self, data: bytes) -> list[bytes]:
        self._rounds += 1
        new = self._directory / f"new.{self.rank}"
        new.write_bytes(data)
        new.rename(self._directory / f"{self._rounds}.{self.rank}")
        files = [self._directory / f"{self._rounds}.{rank}" for rank in range(self.size)]
        while not all(file.exists() for file in files):
            time.sleep(1e-3)
        return [file.read_bytes() for file in files]


def main(directory: str, rank: int, size: int) -> None:
    connections = TcpConnections(FileBootstrap(Path(directory), rank, size), Rails("127.0.0.1"), core())
    wire = Wire(connections.handle, rank, size, LARGEST_TAG)
    engine = Engine(wire)
    driver = ProgressDriver(engine, background=False)
    coder = Coder(get_codec("split"), get_device("host"))

    def run(collective: str, algorithm: str, values: np.ndarray) -> None:
        blocks = Blocks.even(as_buffer(values), 1)
        built = build(collective, algorithm, size, 0, in_place=True)
        layout = Layout(built.spec, blocks, blocks, CHUNK)
        task = CollectiveTask(built, layout, blocks.buffer.dtype, coder, wire, engine.free_tag(), name=collective)
        job = Job(task, f"{collective} of {values.size}")
        driver.submit(job)
        driver.wait(job)
        if job.error is not None:
            raise job.error

    weights = [np.random.default_rng(7).normal(0, 0.02, COUNT).astype(np.float32) for _ in range(2)]
    values = weights[0] if rank == 0 else np.zeros(COUNT, np.float32)
    run("broadcast", "chain", values)
    assert np.array_equal(values, weights[1])
    # The weights are compressed, and rank 0 only sends.
    assert rank != 0 or wire.bytes_sent < 0.95 * weights[1].nbytes, wire.bytes_sent

    integers = [np.random.default_rng(one).integers(-50, 50, COUNT).astype(np.float32) for one in range(size)]
    total = integers[rank].copy()
    run("allreduce", "ring", total)
    assert np.array_equal(total, np.sum(integers, axis=0))

    driver.close()
    connections.close()
    wire.close()
    assert "libmpi" not in Path("/proc/self/maps").read_text()
    print("passed")


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
