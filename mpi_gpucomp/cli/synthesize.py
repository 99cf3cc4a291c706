"""The command `synthesize`: solves for a schedule on a topology, and compares it with the built-in algorithms."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpi_gpucomp._tuning.model import default_algorithm
from mpi_gpucomp.cli.command import (
    CLEAR,
    Command,
    add_collective,
    add_options,
    chunk_bytes,
    find_algorithm,
    find_codec_cost,
    find_topology,
    format_size,
    milliseconds,
    parse_seconds,
    table,
)
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.algorithms import TABLE, build
from mpi_gpucomp.schedule.ir import COLLECTIVES
from mpi_gpucomp.schedule.msccl_xml import XmlHeader, add_schedule, write
from mpi_gpucomp.schedule.simulate import simulate
from mpi_gpucomp.schedule.sketch import default_sketch, read_sketch
from mpi_gpucomp.schedule.synth import synthesise

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from mpi_gpucomp.schedule.cost import CodecCost
    from mpi_gpucomp.schedule.simulate import Simulation
    from mpi_gpucomp.schedule.sketch import Sketch
    from mpi_gpucomp.schedule.synth import Synthesis
    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["COMMAND"]

SIZE_RANGE = 4
"""A plan is used for messages from 1/SIZE_RANGE to SIZE_RANGE times the size that it was made for."""
WORTH = 0.97
"""A plan is written only if it takes at most this share of the time of the default algorithm."""
CLEARLY = 0.9
"""A built-in algorithm is the plan if it takes at most this share of the synthesized schedule's predicted time.

Reductions of synthesized schedules take longer than predicted.
"""
MAX_COMPARED_RANKS = 64
"""With more ranks, building the built-in algorithms for the comparison takes too long."""


def _add_arguments(parser: ArgumentParser) -> None:
    add_collective(parser)
    add_options(parser, "--topology", "--ranks", "--root", "--size", "--codec", "--chunk", "--in-place")
    option = parser.add_argument
    option("--mixed", action="store_true", help="encode only on the links where it pays")
    option("--sketch", type=Path, metavar="FILE", help="a communication sketch with TACCL's fields (default: derived)")
    option("--chunkup", type=int, metavar="N", help="chunks of each rank's data per loop")
    option("--time", type=parse_seconds, default=30.0, metavar="SECONDS", help="time limit of the solver (default 30)")
    add_options(parser, "--output", help="write the schedule to this file, as MSCCL XML")
    add_options(parser, "--plans", help="add the schedule to this library, for sizes around --size")


def _run(args: Namespace) -> int:
    topology, collective = find_topology(args), args.collective
    cost = find_codec_cost(args.codec, topology)
    chunk = chunk_bytes(args.chunk, args.size, args.codec, topology)
    try:
        made = synthesise(
            topology,
            collective,
            args.size,
            chunk,
            root=args.root,
            sketch=_sketch(args, topology, collective),
            codec=cost,
            mixed=args.mixed,
            in_place=args.in_place,
            seconds=args.time,
            progress=_show_progress if sys.stderr.isatty() else None,
        )
    finally:
        if sys.stderr.isatty():
            sys.stderr.write(CLEAR)
    result = simulate(made.algorithm, topology, args.size, chunk, cost)
    built_in = _built_in(collective, topology, args, chunk, cost)
    print(_summary(made, result, built_in, args, chunk))
    if args.output:
        args.output.write_text(write(made.algorithm, XmlHeader(topology.hash)), encoding="utf-8")
    if args.plans:
        print(_write_plan(made, result, built_in, args))
    return 0


def _sketch(args: Namespace, topology: Topology, collective: str) -> Sketch:
    if args.chunkup is not None and args.chunkup < 1:
        remedy = "Divide the data of each rank into at least one chunk."
        raise SpecError("option --chunkup", expected="at least 1", got=str(args.chunkup), remedy=remedy)
    if args.sketch is None:
        return default_sketch(topology, rooted=COLLECTIVES[collective].rooted, chunkup=args.chunkup)
    sketch = read_sketch(args.sketch, topology)
    return replace(sketch, chunkup=args.chunkup) if args.chunkup else sketch


def _show_progress(best: float, bound: float) -> None:
    sys.stderr.write(f"{CLEAR}routing: best {best / 1e3:.4g} ms, lower bound {max(0.0, bound) / 1e3:.4g} ms")
    sys.stderr.flush()


def _built_in(
    collective: str, topology: Topology, args: Namespace, chunk: int, cost: CodecCost | None
) -> list[tuple[float, str]]:
    """Return the predicted times of the built-in algorithms, the fastest first."""
    times: list[tuple[float, str]] = []
    for name in TABLE[collective] if topology.ranks <= MAX_COMPARED_RANKS else ():
        with suppress(SpecError):  # it uses links that the topology does not have
            algorithm = find_algorithm(collective, name, topology.ranks, args.root, topology.nodes)
            times.append((simulate(algorithm, topology, args.size, chunk, cost).seconds, name))
    return sorted(times)


def _summary(
    made: Synthesis, result: Simulation, built_in: list[tuple[float, str]], args: Namespace, chunk: int
) -> str:
    algorithm, routing, topology = made.algorithm, made.routing, result.topology
    name, _, share = result.busiest()
    quality = "optimal" if routing.proven else f"at most {routing.gap:.1%} from optimal"
    rows = [
        ("topology", f"{topology.name} ({topology.hash})"),
        ("algorithm", f"{algorithm.collective}, {algorithm.ranks} ranks, {algorithm.chunks} chunks per loop"),
        ("message", f"{format_size(args.size)} in chunks of {format_size(chunk)}, codec {args.codec or 'none'}"),
        ("routing", f"{milliseconds(routing.seconds)}, {quality} within the sketch; solved in {made.seconds:.1f} s"),
        ("simulated", f"{milliseconds(result.seconds)}; busiest {name}, utilization {share:.0%}"),
    ]
    if built_in:
        rows.append(("built-in", f"{milliseconds(built_in[0][0])} with {built_in[0][1]}"))
    return table(("", ""), rows).lstrip()


def _write_plan(made: Synthesis, result: Simulation, built_in: list[tuple[float, str]], args: Namespace) -> str:
    """Write a plan, unless the algorithm that a communicator uses by default is about as fast.

    The default depends on the nodes, not on which links are slow, so another built-in algorithm may be the best plan.
    """
    algorithm, topology = made.algorithm, result.topology
    default = default_algorithm(algorithm.collective, args.size, topology.nodes)
    fastest = min([result.seconds, *(seconds for seconds, _ in built_in)])
    if any(name == default and seconds * WORTH <= fastest for seconds, name in built_in):
        return f"no plan written: {default}, which communicators use by default, is about as fast"
    prefix = "wrote"
    if built_in and built_in[0][0] <= CLEARLY * result.seconds:
        name = built_in[0][1]
        algorithm = build(algorithm.collective, name, topology.ranks, args.root, topology.nodes, args.in_place)
        prefix = f"{name} is faster than the synthesized schedule: wrote it to"
    path = add_schedule(args.plans, algorithm, topology, args.size // SIZE_RANGE, args.size * SIZE_RANGE)
    return f"{prefix} {path}"


COMMAND = Command(
    "synthesize",
    "solve for a schedule of a collective on a topology, and write it as MSCCL XML",
    "allgather --topology topo.json --size 64MB --plans plans",
    _add_arguments,
    _run,
)
