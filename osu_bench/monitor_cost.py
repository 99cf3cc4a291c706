"""What the monitor costs: broadcasts of 64 MB with and without it, by turns in one run.

mpirun -n 4 python -m osu_bench.monitor_cost

Time is the slowest rank's, processor time is that of all ranks together, which a busy machine disturbs less. The ratio
is the median of those of neighbouring rounds; the quartiles say how sure it is.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median, quantiles
from time import perf_counter, process_time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator

if TYPE_CHECKING:
    from collections.abc import Callable

NBYTES = 1 << 26


class Cost(NamedTuple):
    """Of one call, in milliseconds."""

    time: float
    processor: float


def cost(world: MPI.Intracomm, call: Callable[[], object], repeats: int = 3) -> Cost:
    """Measure a call."""
    world.Barrier()
    start, used = perf_counter(), process_time()
    for _ in range(repeats):
        call()
    time, used = perf_counter() - start, process_time() - used
    world.Barrier()
    each = 1e3 / repeats
    return Cost(float(world.allreduce(time, MPI.MAX)) * each, float(world.allreduce(used)) * each)


def rounds_of(world: MPI.Intracomm, codec: str, rounds: int) -> list[tuple[Cost, Cost]]:
    """Return the costs of each round, without the monitor and with it; who is first changes with each round."""
    values = np.random.default_rng(0).normal(0, 0.02, NBYTES // 4).astype(np.float32)
    with Communicator(world, codec, monitor=False) as without, Communicator(world, codec, monitor=True) as watched:
        calls = [partial(comm.Bcast, values) for comm in (without, watched)]
        found = []
        for number in range(-2, rounds):
            first = number % 2
            costs = {which: cost(world, calls[which]) for which in (first, 1 - first)}
            if number >= 0:
                found.append((costs[0], costs[1]))
    return found


def _row(codec: str, what: str, pairs: list[tuple[float, float]]) -> str:
    off, on = (median(values) for values in zip(*pairs, strict=True))
    low, middle, high = quantiles([with_it / without for without, with_it in pairs])
    return f"  {codec:<10s}{what:<12s}{off:>10.2f}{on:>10.2f}{middle:>9.4f}{low:>10.4f}{high:>8.4f}"


def main() -> None:
    """Print two rows for each codec."""
    parser = argparse.ArgumentParser(prog="osu_bench.monitor_cost", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-i", "--rounds", type=int, default=41)
    parser.add_argument("--codecs", default="none,split")
    options, world = parser.parse_args(), MPI.COMM_WORLD.Dup()
    if world.rank == 0:
        columns = f"{'off (ms)':>10s}{'on (ms)':>10s}{'ratio':>9s}{'quartiles':>18s}"
        print(f"# {world.size} ranks, Bcast of 64 MB\n# {'Codec':<10s}{'':<12s}{columns}")
    for codec in options.codecs.split(","):
        found = rounds_of(world, codec, options.rounds)
        if world.rank == 0:
            for what in Cost._fields:
                print(_row(codec, what, [(getattr(a, what), getattr(b, what)) for a, b in found]), flush=True)


if __name__ == "__main__":
    main()
