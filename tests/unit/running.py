"""Runs collectives of many ranks in one process over the loopback transport, with expected results."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.core.library import CODING, TASK
from mpi_gpucomp.device import as_buffer, get_device
from mpi_gpucomp.engine.coder import Coder
from mpi_gpucomp.engine.program import Blocks, Layout
from mpi_gpucomp.engine.task import CollectiveTask
from mpi_gpucomp.schedule.ir import COLLECTIVES
from mpi_gpucomp.transport.loopback import loopback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.core.wire import Wire
    from mpi_gpucomp.schedule.ir import Algorithm

FUNCTIONS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def lengths(collective: str, ranks: int, count: int) -> tuple[int, int]:
    """Return the blocks that each rank sends and receives."""
    blocks = ranks if COLLECTIVES[collective].blocks else 1
    sent = 1 if collective in ("allgather", "gather") else blocks
    return sent, 1 if collective in ("reduce_scatter", "scatter") else blocks


def expected(collective: str, inputs: Sequence[np.ndarray], rank: int, root: int, op: str) -> np.ndarray | None:
    """Return the expected output of a rank; None where it is undefined."""
    ranks = len(inputs)
    share = np.split(np.asarray(inputs), ranks, axis=1) if inputs[0].size % ranks == 0 else []
    reduced = FUNCTIONS[op].reduce(np.asarray(inputs), axis=0)
    return {
        "broadcast": lambda: inputs[root],
        "reduce": lambda: reduced if rank == root else None,
        "allreduce": lambda: reduced,
        "allgather": lambda: np.concatenate(inputs),
        "gather": lambda: np.concatenate(inputs) if rank == root else None,
        "scatter": lambda: share[rank][root],
        "reduce_scatter": lambda: np.split(reduced, ranks)[rank],
        "alltoall": lambda: np.concatenate([share[rank][sender] for sender in range(ranks)]),
    }[collective]()


class Ranks:
    """One collective on all ranks, with integers in its buffers, so that sums are exact in any order."""

    def __init__(self, algorithm: Algorithm, count: int, codec: str | Codec, dtype: str, **options: object) -> None:
        """Make the buffers and the tasks."""
        collective, ranks = algorithm.collective, algorithm.ranks
        sent, received = lengths(collective, ranks, count)
        random = np.random.default_rng(count)
        self.inputs = [random.integers(-2, 3, sent * count).astype(dtype) for _ in range(ranks)]
        self.outputs = [np.full(received * count, 77, dtype) for _ in range(ranks)]
        if collective == "broadcast":
            self.outputs = [x.copy() for x in self.inputs]
        inline = bool(options.pop("inline", True))
        self.coders = [Coder(get_codec(codec), get_device("host"), inline=inline) for _ in range(ranks)]
        chunk = options.pop("chunk", 50)
        self.tasks = []
        self.wires = options.pop("network", None) or loopback(ranks)
        for rank, wire in enumerate(self.wires):
            output = Blocks.even(as_buffer(self.outputs[rank]), received)
            source = output if collective == "broadcast" else Blocks.even(as_buffer(self.inputs[rank]), sent)
            layout = Layout(algorithm.spec, source, output, chunk)
            dtype_here = output.buffer.dtype
            coder = self.coders[rank]
            task = CollectiveTask(algorithm, layout, dtype_here, coder, wire, 0, name="test", **options)
            task.prepare(task.longest)
            task.run()
            self.tasks.append(task)

    def progress(self) -> bool:
        """Progress all tasks; return True if anything progressed."""
        return any([progress(wire, task) for wire, task in zip(self.wires, self.tasks, strict=True)])

    def drive(self, seconds: float = 30.0) -> None:
        """Progress all tasks until they are done."""
        deadline = time.monotonic() + seconds
        while not all(task.done for task in self.tasks):
            if not self.progress():
                time.sleep(0)
            assert time.monotonic() < deadline, "timed out"


def progress(wire: Wire, task: CollectiveTask) -> bool:
    """Run one wire for a moment, and handle its events as an engine does for its only task."""
    moved = wire.run()
    for event in wire.events():
        if event.kind == CODING:
            task.code(event.op)
        else:
            assert event.kind == TASK
            task.ended()
    return task.progress() or moved
