"""The command `synthesize`: makes an algorithm for a topology, and compares it with those of the table."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi_gpucomp._tuning.model import default_algorithm
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
from mpi_gpucomp.cli.output import CLEAR, table
from mpi_gpucomp.cli.simulate import milliseconds
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.algorithms import TABLE, build
from mpi_gpucomp.schedule.ir import COLLECTIVES
from mpi_gpucomp.schedule.library import add_schedule
from mpi_gpucomp.schedule.msccl_xml import XmlHeader, write
from mpi_gpucomp.schedule.simulate import simulate
from mpi_gpucomp.schedule.sketch import default_sketch, read_sketch
from mpi_gpucomp.schedule.synth import synthesise

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.cost import CodecCost
    from mpi_gpucomp.schedule.simulate import Simulation
    from mpi_gpucomp.schedule.sketch import Sketch
    from mpi_gpucomp.schedule.synth import Synthesis
    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["add"]

RANGE = 4
"""A plan is for messages from a part of the size that it was made for to so many times that size."""
WORTH = 0.97
"""What share of the time of the table's best a plan may take at most."""
CLEARLY = 0.9
"""What share of a synthesised schedule's time one of the table may take to be the plan: its sums take longer."""
MOST_COMPARED = 64
"""With more ranks the algorithms of the table are not built for a comparison."""


def add(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    parser = commands.add_parser(
        "synthesize",
        help="make an algorithm for a topology",
        description="Make an algorithm for a topology by a solver, check it, and write it as MSCCL XML.",
    )
    parser.add_argument("collective", metavar="COLLECTIVE", help="such as bcast or allreduce")
    option = add_options(parser)
    option("--sketch", type=Path, metavar="FILE", help="a sketch with TACCL's fields (default: one that fits)")
    option("--chunkup", type=int, metavar="N", help="chunks of each rank's data in a loop")
    option("--codec", metavar="SPEC", help="one that the topology has figures for (default none)")
    option("--mixed", action="store_true", help="encode on some links alone, where it pays")
    option("--chunk", type=parse_size, metavar="BYTES", help="of a chunk (default: as a communicator would choose)")
    option("--in-place", action="store_true", help="with input and output in one memory")
    option("--time", type=float, default=30.0, metavar="SECONDS", help="for the solver (default 30)")
    option("-o", "--output", type=Path, metavar="FILE", help="write the algorithm there")
    option("--plans", type=Path, metavar="DIR", help="write it to a directory of plans, for sizes around this one")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    topology, collective = topology_of(args), collective_of(args.collective)
    coding = coding_of(args.codec, topology)
    chunk = chunk_of(args)
    try:
        made = synthesise(
            topology,
            collective,
            args.size,
            chunk,
            root=args.root,
            sketch=_sketch(args, topology, collective),
            codec=coding,
            mixed=args.mixed,
            in_place=args.in_place,
            seconds=args.time,
            progress=_show if sys.stderr.isatty() else None,
        )
    finally:
        if sys.stderr.isatty():
            sys.stderr.write(CLEAR)
    found = simulate(made.algorithm, topology, args.size, chunk, coding)
    known = _known(collective, topology, args, chunk, coding)
    print(_described(made, found, known, args, chunk))
    if args.output:
        args.output.write_text(write(made.algorithm, XmlHeader(topology.hash)), encoding="utf-8")
    if args.plans:
        print(_planned(made, found, known, args))
    return 0


def _sketch(args: argparse.Namespace, topology: Topology, collective: str) -> Sketch:
    if args.chunkup is not None and args.chunkup < 1:
        remedy = "Cut each rank's data into one chunk or more."
        raise SpecError("option --chunkup", expected="1 or more", got=str(args.chunkup), remedy=remedy)
    if args.sketch is None:
        return default_sketch(topology, rooted=COLLECTIVES[collective].rooted, chunkup=args.chunkup)
    sketch = read_sketch(args.sketch, topology)
    return replace(sketch, chunkup=args.chunkup) if args.chunkup else sketch


def _show(found: float, bound: float) -> None:
    sys.stderr.write(f"{CLEAR}routing: found {found / 1e3:.4g} ms, none is below {max(0.0, bound) / 1e3:.4g} ms")
    sys.stderr.flush()


def _known(
    collective: str, topology: Topology, args: argparse.Namespace, chunk: int, coding: CodecCost | None
) -> list[tuple[float, str]]:
    """Return the times of the algorithms of the table, the quickest first."""
    times: list[tuple[float, str]] = []
    for name in TABLE[collective] if topology.ranks <= MOST_COMPARED else ():
        with suppress(SpecError):  # it uses links that are not there
            algorithm = algorithm_of(collective, name, topology, args.root)
            times.append((simulate(algorithm, topology, args.size, chunk, coding).seconds, name))
    return sorted(times)


def _described(
    made: Synthesis, found: Simulation, known: list[tuple[float, str]], args: argparse.Namespace, chunk: int
) -> str:
    algorithm, routing, topology = made.algorithm, made.routing, found.topology
    name, _, share = found.busiest()
    quality = (
        "the best within the sketch" if routing.proven else f"at most {routing.gap:.1%} from the best within the sketch"
    )
    rows = [
        ("topology", f"{topology.name} ({topology.hash})"),
        ("algorithm", f"{algorithm.collective}, {algorithm.ranks} ranks, {algorithm.chunks} chunks in a loop"),
        ("message", f"{in_words(args.size)} in chunks of {in_words(chunk)}, codec {args.codec or 'none'}"),
        ("routing", f"{milliseconds(routing.seconds)}, {quality}; solved in {made.seconds:.1f} s"),
        ("simulated", f"{milliseconds(found.seconds)}; busiest {name}, in use {share:.0%} of the time"),
    ]
    if known:
        rows.append(("of the table", f"{milliseconds(known[0][0])} by {known[0][1]}"))
    return table(("", ""), rows).lstrip()


def _planned(made: Synthesis, found: Simulation, known: list[tuple[float, str]], args: argparse.Namespace) -> str:
    """Write a plan, unless what a communicator would take by itself is about as quick.

    It knows the nodes, but not which links are slow: another algorithm of the table may be the best plan.
    """
    algorithm, topology = made.algorithm, found.topology
    usual = default_algorithm(algorithm.collective, args.size, topology.nodes)
    quickest = min([found.seconds, *(seconds for seconds, _ in known)])
    if any(name == usual and seconds * WORTH <= quickest for seconds, name in known):
        return f"no plan is written: {usual} of the table, which communicators take, is about as quick"
    said = "written"
    if known and known[0][0] <= CLEARLY * found.seconds:
        name = known[0][1]
        algorithm = build(algorithm.collective, name, topology.ranks, args.root, topology.nodes, args.in_place)
        said = f"{name} of the table is quicker, and written"
    path = add_schedule(args.plans, algorithm, topology, args.size // RANGE, args.size * RANGE)
    return f"{said} to {path}"
