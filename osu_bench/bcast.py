"""Latency of broadcast: MPI's own beside the compressed chunked chain, in one run, every result verified.

mpirun -n 4 python -m osu_bench.bcast --codecs none,split,zfp:rate=8
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp.codec import find, frame
from mpi_gpucomp.device import as_buffer, get_device
from mpi_gpucomp.errors import GpucompError

Array = np.ndarray[Any, Any]
Broadcast = Callable[[Array], None]

TOLERANCE = 0.05
"""What a lossy result may differ by, as a share of the values' range; the codecs' own tests are much stricter."""


def weights(count: int) -> Array:
    """Make numbers like those of a trained layer, the same on every rank."""
    return np.random.default_rng(count).normal(0, 0.02, count).astype(np.float32)


def sizes(text: str) -> list[int]:
    """Read `[MIN:]MAX` in bytes: the powers of two between them, 4 or more."""
    least, _, most = text.rpartition(":")
    low, high = max(4, int(least or most)), int(most)
    return [1 << power for power in range(2, high.bit_length()) if low <= 1 << power <= high]


def wrong(expected: Array, got: Array, lossless: bool) -> int:
    """Count the values that are not what they should be."""
    if lossless:
        return int((expected.view(np.uint32) != got.view(np.uint32)).sum())
    return int((np.abs(expected - got) > TOLERANCE * max(np.ptp(expected), 1.0)).sum())


def timed(comm: MPI.Intracomm, broadcast: Broadcast, expected: Array, lossless: bool) -> tuple[float, int]:
    """Run one broadcast from rank 0; return the slowest rank's microseconds and the wrong values of all ranks."""
    values = expected.copy() if comm.rank == 0 else np.zeros_like(expected)
    comm.Barrier()
    start = perf_counter()
    broadcast(values)
    elapsed = perf_counter() - start
    return comm.allreduce(elapsed, MPI.MAX) * 1e6, comm.allreduce(wrong(expected, values, lossless))


def measure(comm: MPI.Intracomm, contenders: dict[str, Broadcast], expected: Array, rounds: int) -> dict[str, float]:
    """Run the contenders in turn; return the median microseconds of each after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, broadcast in contenders.items():
            lossless = name == "mpi" or find(name).lossless
            microseconds, errors = timed(comm, broadcast, expected, lossless)
            if errors:
                raise SystemExit(f"rank {comm.rank}: {name}: {errors} of {expected.size} values are wrong")
            if turn:
                times[name].append(microseconds)
    return {name: median(measured) for name, measured in times.items()}


def ratio(spec: str, chunk: Array) -> float:
    """Return how many times smaller a chunk gets on the wire."""
    codec, source, device = find(spec), as_buffer(chunk), get_device("host")
    with device.alloc(frame.room(codec, source.count, source.dtype)) as room:
        nbytes = frame.encode(codec, source, room, 0, device.stream(inline=True)).size()
    return chunk.nbytes / (nbytes or 1)


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="osu_bench.bcast", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--message-size", default="1048576:67108864", help="[MIN:]MAX bytes")
    parser.add_argument("-i", "--iterations", type=int, default=5)
    parser.add_argument("--codecs", default="none,split,bound:rel=1e-3,zfp:rate=8", help="separated by commas")
    parser.add_argument("--chunk", type=int, default=1 << 20, help="plain bytes of a chunk")
    return parser.parse_args()


def main() -> None:
    """Print a table: a row for a size; latency and ratio for each contender."""
    options, comm = parsed(), MPI.COMM_WORLD
    specs = options.codecs.split(",")
    with Communicator(comm, chunk=options.chunk) as chain:
        contenders: dict[str, Broadcast] = {"mpi": comm.Bcast}
        contenders |= {spec: partial(chain.Bcast, codec=spec, algorithm="chain") for spec in specs}
        if comm.rank == 0:
            print(f"\n# Broadcast of float32 weights to {comm.size} ranks: MPI's own, and the chain with each codec")
            print("# Size    " + "".join(f"{f'{name} (us)':>20s}{'ratio':>7s}" for name in contenders))
        for size in sizes(options.message_size):
            values = weights(size // 4)
            results = measure(comm, contenders, values, options.iterations)
            if comm.rank == 0:
                ratios = {spec: ratio(spec, values[: options.chunk // 4]) for spec in specs}
                cells = (f"{time:20.2f}{ratios.get(name, 1.0):7.2f}" for name, time in results.items())
                print(f"{size:<10d}" + "".join(cells), flush=True)


if __name__ == "__main__":
    try:
        main()
    except GpucompError as error:
        print(error, file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)
