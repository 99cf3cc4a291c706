"""Processor time of the engine for each chunk and rank: chain broadcasts over the loopback wire in one process.

A raw chunk is sent from and received into the caller's memory, so that nothing is left but the engine and the wire's
copy. A framed chunk is also copied into a frame and out of it, and its checksum computed twice on its way.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from statistics import median
from time import process_time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.core.library import TASK
from mpi_gpucomp.device import as_buffer, get_device
from mpi_gpucomp.engine.coder import Coder
from mpi_gpucomp.engine.program import Blocks, Layout
from mpi_gpucomp.engine.task import CollectiveTask
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.transport.loopback import loopback
from osu_bench.arguments import CommandParser, number

if TYPE_CHECKING:
    from mpi_gpucomp.core.wire import Wire

MOST_BYTES = 1 << 28
"""The longest message."""
SLEEP_SECONDS = 0.5


class Cost(NamedTuple):
    """The processor time of one chunk on one rank, in microseconds."""

    chunk_bytes: int
    chunks: int
    raw: float
    framed: float


def run(wire: Wire, task: CollectiveTask) -> None:
    """Run a rank's task to its end."""
    while not task.done:
        wire.run(SLEEP_SECONDS)
        for event in wire.events():
            assert event.kind == TASK, event
            task.ended()


def broadcast(ranks: int, chunk_bytes: int, chunks: int, *, raw: bool) -> float:
    """Broadcast that many chunks along a chain, with a thread for each rank; return the seconds of processor time."""
    algorithm, wires = build("broadcast", "chain", ranks), loopback(ranks)
    coder = Coder(get_codec("none"), get_device("host"))
    sent = np.random.default_rng(chunks).integers(0, 256, chunks * chunk_bytes, np.uint8)
    memories = [sent, *(np.zeros_like(sent) for _ in wires[1:])]
    tasks = []
    for wire, memory in zip(wires, memories, strict=True):
        blocks = Blocks.even(as_buffer(memory), 1)
        layout = Layout(algorithm.spec, blocks, blocks, chunk_bytes)
        task = CollectiveTask(algorithm, layout, blocks.buffer.dtype, coder, wire, 0, name="chunk_cost", raw=raw)
        task.prepare(task.longest)
        tasks.append(task)
    threads = [threading.Thread(target=run, args=pair) for pair in zip(wires, tasks, strict=True)]
    for task in tasks:
        task.run()
    began = process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = process_time() - began
    for task in tasks:
        task.free()
    coder.close()
    if not all(np.array_equal(memory, sent) for memory in memories):
        raise RuntimeError("a rank has received other bytes")
    return took


def measure(ranks: int, chunk_bytes: int, chunks: int, rounds: int) -> Cost:
    """Return the median costs of rounds of raw and framed broadcasts, by turns, after one that is not measured."""
    chunks = max(1, min(chunks, MOST_BYTES // chunk_bytes))
    seconds = [[broadcast(ranks, chunk_bytes, chunks, raw=raw) for raw in (True, False)] for _ in range(rounds + 1)]
    raw, framed = (median(column) / chunks / ranks * 1e6 for column in zip(*seconds[1:], strict=True))
    return Cost(chunk_bytes, chunks, raw, framed)


def numbers(text: str) -> list[int]:
    """Parse numbers of bytes."""
    return [number(one) for one in text.split(",")]


EXAMPLE = "osu_bench chunk_cost --sizes 64,1M"


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each size of chunk."""
    parser = CommandParser("osu_bench chunk_cost", (__doc__ or "").splitlines()[0], EXAMPLE)
    parser.add_argument("--sizes", type=numbers, default="64,64K,1M", metavar="A,B", help="of a chunk (64,64K,1M)")
    parser.add_argument("--chunks", type=int, default=20_000, help="chunks of a broadcast, at most 256 MB (20000)")
    parser.add_argument("--ranks", type=int, default=3, help="ranks of the chain (3)")
    parser.add_argument("-i", "--rounds", type=int, default=7, help="measured rounds (7)")
    options = parser.parse_args(argv)
    print(f"# {options.ranks} ranks in one process, processor time of a chunk on a rank, median of {options.rounds}")
    print(f"# {'Chunk (bytes)':<14s}{'Chunks':>8s}{'raw (us)':>12s}{'framed (us)':>14s}")
    for size in options.sizes:
        found = measure(options.ranks, size, options.chunks, options.rounds)
        print(f"  {found.chunk_bytes:<14d}{found.chunks:>8d}{found.raw:>12.2f}{found.framed:>14.2f}", flush=True)


if __name__ == "__main__":
    main()
