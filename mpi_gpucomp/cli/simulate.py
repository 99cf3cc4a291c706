"""The command `simulate`: predicts the time of a collective on a topology, or compares its algorithms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp._tuning.model import CHUNK_SIZES, MIN_CODED_CHUNK
from mpi_gpucomp.cli.command import (
    Command,
    Progress,
    add_collective,
    add_options,
    chunk_bytes,
    find_algorithm,
    find_codec_cost,
    find_topology,
    format_size,
    milliseconds,
    table,
)
from mpi_gpucomp.errors import DeviceError, SpecError
from mpi_gpucomp.schedule.algorithms import TABLE
from mpi_gpucomp.schedule.msccl_xml import ScheduleLibrary
from mpi_gpucomp.schedule.simulate import simulate

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from mpi_gpucomp.schedule.ir import Algorithm
    from mpi_gpucomp.schedule.simulate import PathPart, Simulation
    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["COMMAND"]

MAX_PATH_ROWS = 12
"""Rows of a critical path that are printed; the middle of a longer path is omitted."""
MAX_PLOT_RANKS = 64
COLOURS = {
    "send": "#3b6ea8",
    "encode": "#c8553d",
    "decode": "#e0a458",
    "reduce": "#6b8f71",
    "copy": "#999999",
    "stage": "#8c6d5a",
    "handle": "#7d5ba6",
}
COMPARISON = ("algorithm", "codec", "chunk", "predicted", "relative", "busiest")
MAX_MESSAGES = 300_000
"""Messages per loop above which an algorithm is not compared: simulating it would take minutes."""


def _add_arguments(parser: ArgumentParser) -> None:
    add_collective(parser)
    add_options(parser, "--topology", "--ranks", "--root", "--size")
    add_options(parser, "--codec", nargs="+", action="extend", help="a codec that the topology has costs for, or none")
    one = parser.add_argument_group("simulate one algorithm")
    add_options(one, "--algorithm", "--chunk")
    one.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Chrome or Perfetto")
    one.add_argument("--plot", type=Path, metavar="FILE", help="plot the activity of every rank over time")
    many = parser.add_argument_group("simulate all algorithms")
    many.add_argument(
        "--compare", action="store_true", help="list all algorithms and codecs, each with its best chunk size"
    )
    add_options(many, "--plans", help="include the schedules of this library")


def _run(args: Namespace) -> int:
    for name in ("algorithm", "chunk", "trace", "plot") if args.compare else ("plans",):
        if getattr(args, name) is not None:
            args.parser.error(f"--{name} {'conflicts with' if args.compare else 'requires'} --compare")
    if args.compare:
        return _compare(args)
    if args.codec and len(args.codec) > 1:
        args.parser.error("several codecs require --compare")
    return _simulate(args, args.codec[0] if args.codec else "none")


def _simulate(args: Namespace, spec: str) -> int:
    topology = find_topology(args)
    cost = find_codec_cost(spec, topology)
    algorithm = find_algorithm(args.collective, args.algorithm, topology.ranks, args.root, topology.nodes)
    chunk = chunk_bytes(args.chunk, args.size, spec, topology)
    result = simulate(algorithm, topology, args.size, chunk, cost)
    message = f"{format_size(args.size)} in chunks of {format_size(chunk)}, codec {spec}"
    print(_summary(result, args.collective, message))
    if args.trace:
        args.trace.write_text(json.dumps(result.trace()), encoding="utf-8")
    if args.plot:
        _plot(result, args.plot)
    return 0


def _summary(result: Simulation, collective: str, message: str) -> str:
    name, nbytes, share = result.busiest()
    rows = [
        ("topology", result.topology.name),
        ("collective", f"{collective} {result.algorithm}, {result.ranks} ranks"),
        ("message", message),
        ("time", milliseconds(result.seconds)),
        ("busiest", f"{name}: {format_size(nbytes)}, utilization {share:.0%}"),
        ("messages", str(sum(record.kind == "send" for record in result.records))),
    ]
    path, half = result.critical_path(), MAX_PATH_ROWS // 2
    shown = path if len(path) <= MAX_PATH_ROWS else [*path[:half], None, *path[-half:]]
    path_rows = [_path_row(part) if part else ("...", f"{len(path) - 2 * half} more", "") for part in shown]
    header = ("critical path", "times", "ms")
    return f"{table(('', ''), rows).lstrip()}\n\n{table(header, path_rows, ('times', 'ms'))}"


def _path_row(part: PathPart) -> tuple[str, str, str]:
    return part.activity, str(part.times), f"{part.seconds * 1e3:.3f}"


def _plot(result: Simulation, path: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        remedy = "Install the extra: pip install mpi_gpucomp[plot]."
        raise DeviceError("option --plot", expected="matplotlib", got="none", remedy=remedy) from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    every = -(-result.ranks // MAX_PLOT_RANKS)
    figure, axes = pyplot.subplots(figsize=(10, 2 + 0.18 * min(result.ranks, MAX_PLOT_RANKS)), layout="constrained")
    for kind, colour in COLOURS.items():
        for rank in range(0, result.ranks, every):
            own = [one for one in result.records if one.rank == rank and one.kind == kind]
            bars = [(one.start * 1e3, (one.end - one.start) * 1e3) for one in own]
            low = rank / every - (0.4 if kind == "send" else 0.0)
            axes.broken_barh(bars, (low, 0.4), color=colour, linewidth=0, label=None if rank else kind)
    axes.set_yticks(range(-(-result.ranks // every)), [str(rank) for rank in range(0, result.ranks, every)], fontsize=6)
    axes.set(xlabel="ms", ylabel="rank", title=f"{result.algorithm} on {result.topology.name}")
    axes.legend(loc="upper left", ncols=len(COLOURS), fontsize=7)
    axes.invert_yaxis()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


class _Candidate(NamedTuple):
    algorithm: str
    codec: str
    chunk: int
    seconds: float
    busiest: str


def _compare(args: Namespace) -> int:
    """Simulate every algorithm with every codec, and print them in the order of their predicted times."""
    topology, collective = find_topology(args), args.collective
    codecs = ["none", *(spec for spec in args.codec or topology.codecs if spec != "none")]
    names = [*TABLE[collective], *(_plans(args.plans, collective, topology, args.root) if args.plans else ())]
    candidates: list[_Candidate] = []
    skipped: list[str] = []
    with Progress(len(names)) as progress:
        for name in names:
            progress.start(name)
            try:
                algorithm = find_algorithm(collective, name, topology.ranks, args.root, topology.nodes)
                candidates += [_best_chunk(algorithm, topology, args.size, spec) for spec in codecs]
            except SpecError as error:
                skipped.append(f"{name}: expected {error.expected}, got {error.got}")
    candidates.sort(key=lambda one: one.seconds)
    rows = [
        (
            *(one.algorithm, one.codec, format_size(one.chunk), milliseconds(one.seconds)),
            *(_relative(one.seconds, candidates[0].seconds), one.busiest),
        )
        for one in candidates
    ]
    print(f"{collective} of {format_size(args.size)} on {topology.name}, {topology.ranks} ranks\n")
    print(table(COMPARISON, rows, ("chunk", "predicted", "relative")))
    for reason in skipped:
        print(f"skipped {reason}")
    return 0


def _plans(folder: Path, collective: str, topology: Topology, root: int) -> list[str]:
    """Return the files of a schedule library for this collective and these nodes."""
    entries = ScheduleLibrary(folder, topology.nodes).entries
    key = collective, topology.ranks, root
    return [
        str(entry.path)
        for entry in entries
        if (entry.algorithm.collective, entry.algorithm.ranks, entry.algorithm.spec.root) == key
    ]


def _best_chunk(algorithm: Algorithm, topology: Topology, nbytes: int, spec: str) -> _Candidate:
    """Simulate an algorithm with all chunk sizes and return the fastest."""
    cost = find_codec_cost(spec, topology)
    messages = sum(step.count for program in algorithm.programs for _, _, step in program.steps() if step.sends)
    if messages > MAX_MESSAGES:
        expected = f"at most {MAX_MESSAGES} messages per loop"
        raise SpecError(algorithm.name, expected=expected, got=str(messages), remedy="Simulate fewer ranks.")
    candidates = []
    for chunk in CHUNK_SIZES:
        loops = -(-nbytes // (chunk * algorithm.chunks))
        if (cost and chunk < MIN_CODED_CHUNK) or (messages * loops > MAX_MESSAGES and chunk != CHUNK_SIZES[-1]):
            continue
        result = simulate(algorithm, topology, nbytes, chunk, cost)
        candidates.append(_Candidate(algorithm.name, spec, chunk, result.seconds, result.busiest()[0]))
    return min(candidates, key=lambda one: one.seconds)


def _relative(seconds: float, best: float) -> str:
    return f"{seconds / best:.2f}" if best else "1.00"


COMMAND = Command(
    "simulate",
    "predict the time of a collective on a topology, or compare its algorithms",
    "allreduce --topology dgx2 --ranks 16 --size 64MB --compare",
    _add_arguments,
    _run,
)
