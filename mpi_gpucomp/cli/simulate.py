"""The command `simulate`: how long a collective would take on a topology, and what holds it up."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi_gpucomp._tuning.model import CHUNKS, LEAST_CODED
from mpi_gpucomp.cli.options import (
    add_options,
    algorithm_of,
    chunk_of,
    coding_of,
    collective_of,
    in_words,
    parse_size,
    topology_of,
)
from mpi_gpucomp.cli.output import Progress, table
from mpi_gpucomp.errors import DeviceError, SpecError
from mpi_gpucomp.schedule.algorithms import TABLE
from mpi_gpucomp.schedule.library import ScheduleLibrary
from mpi_gpucomp.schedule.simulate import simulate

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm
    from mpi_gpucomp.schedule.simulate import PathPart, Simulation
    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["add", "explain_add", "milliseconds"]

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
    parts = [_part(part) if part else ("...", f"{len(path) - SHOWN} more", "") for part in shown]
    header = ("critical path", "times", "ms")
    return f"{table(('', ''), rows).lstrip()}\n\n{table(header, parts, ('times', 'ms'))}"


def _part(part: PathPart) -> tuple[str, str, str]:
    return part.activity, str(part.times), f"{part.seconds * 1e3:.3f}"


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


# The command `explain`: every way to do a collective on a topology, with the time that the cost model predicts.

HEADER = ("algorithm", "codec", "chunk", "predicted", "against the best", "busiest")
MOST_MESSAGES = 300_000
"""An algorithm that sends more in a loop is left out: to follow it would take minutes."""


class _Candidate(NamedTuple):
    algorithm: str
    codec: str
    chunk: int
    seconds: float
    busiest: str


def explain_add(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    parser = commands.add_parser(
        "explain",
        help="list the ways to do a collective on a topology, with predicted times",
        description="Simulate every algorithm of a collective, plain and with the codecs, each with its best chunk.",
    )
    parser.add_argument("collective", metavar="COLLECTIVE", help="such as bcast or allreduce")
    option = add_options(parser)
    option("--codec", action="append", metavar="SPEC", help="only these codecs (default: all that have figures)")
    option("--plans", type=Path, metavar="DIR", help="also the plans of this directory that fit")
    parser.set_defaults(run=_explain_run)


def _explain_run(args: argparse.Namespace) -> int:
    topology, collective = topology_of(args), collective_of(args.collective)
    codecs = ["none", *(spec for spec in args.codec or topology.codecs if spec != "none")]
    names = [*TABLE[collective], *(_plans(args.plans, collective, topology, args.root) if args.plans else ())]
    found: list[_Candidate] = []
    left_out: list[str] = []
    with Progress(len(names)) as progress:
        for name in names:
            progress.start(name)
            try:
                algorithm = algorithm_of(collective, name, topology, args.root)
                found += (_best(algorithm, topology, args.size, spec) for spec in codecs)
            except SpecError as error:
                left_out.append(f"{name}: {error.expected}, got {error.got}")
    found.sort(key=lambda one: one.seconds)
    rows = [
        (one.algorithm, one.codec, in_words(one.chunk), milliseconds(one.seconds), _times(one, found[0]), one.busiest)
        for one in found
    ]
    print(f"{collective} of {in_words(args.size)} on {topology.name}, {topology.ranks} ranks\n")
    print(table(HEADER, rows, ("chunk", "predicted", "against the best")))
    for reason in left_out:
        print(f"left out: {reason}")
    return 0


def _plans(folder: Path, collective: str, topology: Topology, root: int) -> list[str]:
    """Return the files of plans for this collective and these nodes."""
    wanted = collective, topology.ranks, root
    entries = ScheduleLibrary(folder, topology.nodes).entries
    found = ((entry.path, entry.algorithm) for entry in entries)
    return [str(path) for path, made in found if (made.collective, made.ranks, made.spec.root) == wanted]


def _best(algorithm: Algorithm, topology: Topology, nbytes: int, spec: str) -> _Candidate:
    """Return a way with the chunk that suits it best."""
    coding = coding_of(spec, topology)
    messages = sum(step.count for program in algorithm.programs for _, _, step in program.steps() if step.sends)
    candidates = []
    for chunk in CHUNKS:
        loops = -(-nbytes // (chunk * algorithm.chunks))
        if (coding and chunk < LEAST_CODED) or (messages * loops > MOST_MESSAGES and chunk != CHUNKS[-1]):
            continue
        if messages > MOST_MESSAGES:
            expected = f"at most {MOST_MESSAGES} messages in a loop"
            raise SpecError(algorithm.name, expected=expected, got=str(messages), remedy="Ask for fewer ranks.")
        made = simulate(algorithm, topology, nbytes, chunk, coding)
        candidates.append(_Candidate(algorithm.name, spec, chunk, made.seconds, made.busiest()[0]))
    return min(candidates, key=lambda one: one.seconds)


def _times(one: _Candidate, best: _Candidate) -> str:
    return f"{one.seconds / best.seconds:.2f}" if best.seconds else "1.00"
