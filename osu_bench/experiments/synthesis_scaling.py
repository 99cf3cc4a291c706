"""Synthesis time against the number of ranks: osu_bench synthesis_scaling --plot growth.png.

Each schedule is for a message of 1 MiB per rank, on nodes of eight GPUs. Times cover routing, ordering, lowering and
verification; CPU time is printed too, because machines are often shared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

from mpi_gpucomp.cli.command import table
from mpi_gpucomp.schedule.synth import synthesise
from mpi_gpucomp.schedule.topology import preset
from osu_bench.arguments import CommandParser

__all__ = ["main"]

HEADER = ("ranks", "collective", "seconds", "CPU seconds", "optimality gap")
CHUNK = 1 << 20
RANKS = (8, 16, 24, 32, 48, 64, 80)
COLLECTIVES = ("broadcast", "allgather", "allreduce")
LIMIT = 30.0


class Measured(NamedTuple):
    """The cost of one synthesis."""

    ranks: int
    collective: str
    seconds: float
    cpu_seconds: float
    gap: float


def measure(ranks: int, collective: str, limit: float) -> Measured:
    """Synthesise a schedule and time it."""
    wall, processor = perf_counter(), process_time()
    made = synthesise(preset("dgx-a100", ranks), collective, ranks * CHUNK, CHUNK, seconds=limit)
    return Measured(ranks, collective, perf_counter() - wall, process_time() - processor, made.routing.gap)


def draw(measured: Sequence[Measured], path: Path) -> None:
    """Plot CPU time against the number of ranks for each collective."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for collective in dict.fromkeys(one.collective for one in measured):
        own = [one for one in measured if one.collective == collective]
        axes.plot([one.ranks for one in own], [one.cpu_seconds for one in own], marker="o", label=collective)
    axes.set(xlabel="ranks, eight per node", ylabel="CPU seconds", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


EXAMPLE = "osu_bench synthesis_scaling --ranks 8 16 32 --plot growth.png"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a row for each number of ranks and collective."""
    parser = CommandParser("osu_bench synthesis_scaling", (__doc__ or "").splitlines()[0], EXAMPLE)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, metavar="N", help="multiples of 8")
    parser.add_argument(
        "--collective", nargs="+", default=COLLECTIVES, metavar="NAME", help="collectives to synthesise"
    )
    parser.add_argument(
        "--time", type=float, default=LIMIT, metavar="SECONDS", help="time limit of the solver (default 30)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot time against ranks")
    args = parser.parse_args(argv)
    measured = [measure(ranks, name, args.time) for ranks in args.ranks for name in args.collective]
    rows = [
        (str(one.ranks), one.collective, f"{one.seconds:.1f}", f"{one.cpu_seconds:.1f}", f"{one.gap:.1%}")
        for one in measured
    ]
    print(table(HEADER, rows, ("ranks", "seconds", "CPU seconds", "optimality gap")))
    if args.plot:
        draw(measured, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
