"""Overhead of a Communicator over mpi4py: small messages, and large ones without a codec.

    mpirun -n 4 osu_bench overhead

Candidates alternate in one run; each figure is the median over rounds of the slowest rank's mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp.cli.command import allgather_json
from osu_bench.arguments import CommandParser

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]
REPEATS = {8: 2000, 1024: 1000, 32768: 200}
"""Calls per round by message size; one for larger messages."""


def mean_time(comm: MPI.Intracomm, call: Callable[[], object], repeats: int) -> float:
    """Return the slowest rank's mean microseconds per call."""
    comm.Barrier()
    start = perf_counter()
    for _ in range(repeats):
        call()
    return float(max(allgather_json(comm, (perf_counter() - start) / repeats)) * 1e6)


def compare(comm: MPI.Intracomm, calls: list[Callable[[], object]], repeats: int, rounds: int) -> list[float]:
    """Return the median times of alternating calls."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for number, call in enumerate(calls):
            times[number].append(mean_time(comm, call, repeats))
    return [median(some) for some in times]


def candidates(native: MPI.Intracomm, ours: Communicator, size: int) -> dict[str, list[Callable[[], object]]]:
    """Return the native call and ours for each collective."""
    values, out = np.zeros(size, np.uint8).view(np.float64), np.zeros(size, np.uint8).view(np.float64)
    calls: dict[str, list[Callable[[], object]]] = {"Bcast": [partial(c.Bcast, values) for c in (native, ours)]}
    if size <= max(REPEATS):
        calls["Allreduce"] = [partial(c.Allreduce, values, out) for c in (native, ours)]
    return calls


EXAMPLE = "mpirun -n 4 osu_bench overhead --codec none"


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each collective and size, with the difference and the ratio."""
    parser = CommandParser("osu_bench overhead", (__doc__ or "").splitlines()[0], EXAMPLE)
    parser.add_argument("-i", "--rounds", type=int, default=11, help="measured rounds (11)")
    parser.add_argument("--codec", default="none", metavar="SPEC", help="codec of the calls (none)")
    options, native = parser.parse_args(argv), MPI.COMM_WORLD.Dup()
    with Communicator(native, options.codec) as ours:
        if native.rank == 0:
            print(f"# {native.size} ranks, codec {options.codec}: mpi4py, and the same call through a Communicator")
            columns = f"{'mpi4py (us)':>14s}{'ours (us)':>14s}{'more (us)':>12s}{'ratio':>8s}"
            print(f"# {'Collective':<12s}{'Size':>10s}{columns}")
        for size in (*REPEATS, 1 << 20, 1 << 26):
            for name, calls in candidates(native, ours, size).items():
                own, time = compare(native, calls, REPEATS.get(size, 1), options.rounds)
                if native.rank == 0:
                    print(
                        f"  {name:<12s}{size:>10d}{own:>14.2f}{time:>14.2f}{time - own:>12.2f}{time / own:>8.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
