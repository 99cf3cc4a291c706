"""Overhead of the monitor: broadcasts of 64 MB with and without it, alternating in one run.

    mpirun -n 4 osu_bench monitor_cost

Each call is compared with its neighbour, and the order alternates. Time is the slowest rank's; CPU time is the sum over
ranks, which a busy machine disturbs less. The overhead is the trimmed mean of the differences (10 % on each side), with
a 95 % bootstrap interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator
from osu_bench.arguments import CommandParser

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

NBYTES = 1 << 26
WARM = 4
TRIMMED, RESAMPLES = 0.1, 2000


class Added(NamedTuple):
    """The overhead of the monitor, relative to calls without it."""

    without: float
    """Seconds of a call without the monitor."""
    share: float
    """The overhead as a share of that."""
    low: float
    high: float
    """The confidence interval of the share."""


def measure(world: MPI.Intracomm, call: Callable[[], object]) -> tuple[float, float]:
    """Return this rank's time and CPU time of one call, after a barrier."""
    world.Barrier()
    start, used = perf_counter(), process_time()
    call()
    return perf_counter() - start, process_time() - used


def rounds_of(world: MPI.Intracomm, codec: str, rounds: int) -> npt.NDArray[Any]:
    """Return this rank's time and CPU time in each round, without and with the monitor."""
    values = np.random.default_rng(0).normal(0, 0.02, NBYTES // 4).astype(np.float32)
    found = np.zeros((rounds, 2, 2))
    with Communicator(world, codec, monitor=False) as without, Communicator(world, codec, monitor=True) as monitored:
        for number in range(-WARM, rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                costs = measure(world, lambda comm=(without, monitored)[which]: comm.Bcast(values))  # type: ignore[misc]
                if number >= 0:
                    found[number, which] = costs
    return found


def added(pairs: npt.NDArray[Any]) -> Added:
    """Compute the overhead from pairs of calls, without and with the monitor."""
    differences, rng = pairs[:, 1] - pairs[:, 0], np.random.default_rng(0)
    without = _middle(pairs[None, :, 0])[0]
    means = _middle(rng.choice(differences, (RESAMPLES, len(differences))))
    low, high = np.quantile(means, (0.025, 0.975))
    return Added(without, _middle(differences[None])[0] / without, low / without, high / without)


def _middle(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the trimmed mean of each row."""
    cut = int(TRIMMED * rows.shape[1])
    means: npt.NDArray[Any] = np.sort(rows, axis=1)[:, cut : rows.shape[1] - cut].mean(axis=1)
    return means


EXAMPLE = "mpirun -n 4 osu_bench monitor_cost --codecs none,split"


def main(argv: Sequence[str] | None = None) -> None:
    """Print two rows for each codec."""
    parser = CommandParser("osu_bench monitor_cost", (__doc__ or "").splitlines()[0], EXAMPLE)
    parser.add_argument("-i", "--rounds", type=int, default=200, help="measured rounds (200)")
    parser.add_argument("--codecs", default="none,split", metavar="A,B", help="codecs to measure with (none,split)")
    options, world = parser.parse_args(argv), MPI.COMM_WORLD.Dup()
    if world.rank == 0:
        columns = f"{'off (ms)':>10s}{'added':>9s}{'95 % interval':>20s}"
        print(f"# {world.size} ranks, Bcast of 64 MB, {options.rounds} pairs\n# {'Codec':<10s}{'':<12s}{columns}")
    for codec in options.codecs.split(","):
        found = rounds_of(world, codec, options.rounds)
        slowest, together = np.zeros_like(found), np.zeros_like(found)
        world.Allreduce(found, slowest, MPI.MAX)
        world.Allreduce(found, together)
        if world.rank == 0:
            for what, pairs in (("time", slowest[..., 0]), ("CPU time", together[..., 1])):
                off, share, low, high = added(pairs)
                interval = f"{low:>+11.2%} ..{high:>+7.2%}"
                print(f"  {codec:<10s}{what:<12s}{off * 1e3:>10.2f}{share:>+9.2%}{interval}", flush=True)


if __name__ == "__main__":
    main()
