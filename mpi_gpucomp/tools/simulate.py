"""The command `simulate`: how long a collective would take on a topology, and what holds it up."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.errors import DeviceError
from mpi_gpucomp.schedule.simulate import simulate
from mpi_gpucomp.tools.asked import add_options, algorithm_of, chunk_of, coding_of, collective_of, topology_of
from mpi_gpucomp.tools.sizes import in_words, parse_size
from mpi_gpucomp.tools.table import table

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.simulate import Segment, Simulation

__all__ = ["add", "milliseconds"]

SHOWN = 12
"""Parts of a critical path that are printed; the middle of a longer one is left out."""
MOST_DRAWN = 64
"""Ranks that a plot can show."""
COLOURS = {
    "send": "#3b6ea8",
    "encode": "#c8553d",
    "decode": "#e0a458",
    "reduce": "#6b8f71",
    "copy": "#999999",
    "handle": "#7d5ba6",
}


def add(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    parser = commands.add_parser(
        "simulate",
        help="say how long a collective would take on a topology",
        description="Simulate a collective on a topology: its time, its busiest link, and what the end waited for.",
    )
    option = add_options(parser)
    option("--collective", default="bcast", metavar="NAME", help="which one (default bcast)")
    option("--algorithm", metavar="NAME", help="one of the table (default: the first), or an MSCCL XML file")
    option("--codec", metavar="SPEC", help="one that the topology has figures for (default none)")
    option("--chunk", type=parse_size, metavar="BYTES", help="of a chunk (default: as a communicator would choose)")
    option("--trace", type=Path, metavar="FILE", help="write a trace for Chrome or Perfetto")
    option("--plot", type=Path, metavar="FILE", help="draw what every rank does when")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    topology, collective = topology_of(args), collective_of(args.collective)
    coding = coding_of(args.codec, topology)
    algorithm = algorithm_of(collective, args.algorithm, topology, args.root)
    chunk = chunk_of(args)
    found = simulate(algorithm, topology, args.size, chunk, coding)
    print(_described(found, collective, args, chunk))
    if args.trace:
        args.trace.write_text(json.dumps(found.trace()), encoding="utf-8")
    if args.plot:
        _draw(found, args.plot)
    return 0


def _described(found: Simulation, collective: str, args: argparse.Namespace, chunk: int) -> str:
    name, nbytes, share = found.busiest()
    rows = [
        ("topology", found.topology.name),
        ("collective", f"{collective} {found.algorithm}, {found.ranks} ranks"),
        ("message", f"{in_words(args.size)} in chunks of {in_words(chunk)}, codec {args.codec or 'none'}"),
        ("time", milliseconds(found.seconds)),
        ("busiest", f"{name}: {in_words(nbytes)}, in use {share:.0%} of the time"),
        ("messages", str(sum(record.kind == "send" for record in found.records))),
    ]
    path = found.critical_path()
    shown = path if len(path) <= SHOWN else [*path[: SHOWN // 2], None, *path[-SHOWN // 2 :]]
    parts = [_part(segment) if segment else ("...", f"{len(path) - SHOWN} more", "") for segment in shown]
    header = ("critical path", "times", "ms")
    return f"{table(('', ''), rows).lstrip()}\n\n{table(header, parts, ('times', 'ms'))}"


def _part(segment: Segment) -> tuple[str, str, str]:
    return segment.what, str(segment.times), f"{segment.seconds * 1e3:.3f}"


def milliseconds(seconds: float) -> str:
    """Write a time so that short and long ones can be compared."""
    return f"{seconds * 1e3:.4g} ms"


def _draw(found: Simulation, path: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        remedy = "Install the extra: pip install mpi_gpucomp[plot]."
        raise DeviceError("option --plot", expected="matplotlib", got="none", remedy=remedy) from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    every = -(-found.ranks // MOST_DRAWN)
    figure, axes = pyplot.subplots(figsize=(10, 2 + 0.18 * min(found.ranks, MOST_DRAWN)), layout="constrained")
    for kind, colour in COLOURS.items():
        for rank in range(0, found.ranks, every):
            own = [one for one in found.records if one.rank == rank and one.kind == kind]
            bars = [(one.start * 1e3, (one.end - one.start) * 1e3) for one in own]
            low = rank / every - (0.4 if kind == "send" else 0.0)
            axes.broken_barh(bars, (low, 0.4), color=colour, linewidth=0, label=None if rank else kind)
    axes.set_yticks(range(-(-found.ranks // every)), [str(rank) for rank in range(0, found.ranks, every)], fontsize=6)
    axes.set(xlabel="ms", ylabel="rank", title=f"{found.algorithm} on {found.topology.name}")
    axes.legend(loc="upper left", ncols=len(COLOURS), fontsize=7)
    axes.invert_yaxis()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
