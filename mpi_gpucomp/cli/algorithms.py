"""The command `algorithms`: lists the algorithms of the collectives, or prints the schedule of one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mpi_gpucomp.cli.command import Command, add_collective, add_options, find_algorithm, table
from mpi_gpucomp.schedule.algorithms import TABLE, algorithms
from mpi_gpucomp.schedule.cost import steps_and_bytes
from mpi_gpucomp.schedule.msccl_xml import write

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm, Lane, Place, Step

__all__ = ["COMMAND", "draw"]

HEADER = ("collective", "algorithm", "description", "best for")
STEPS = {
    "s": "send {source}",
    "r": "receive {target}",
    "rcs": "receive {target}, forward it",
    "rrs": "receive, add {source}, forward",
    "rrc": "receive, add {source}, store in {target}",
    "rrcs": "receive, add {source}, store in {target}, forward",
    "cpy": "copy {source} to {target}",
    "re": "add {source} to {target}",
    "nop": "wait",
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_collective(parser, nargs="?", help="only the algorithms of this collective")
    option = parser.add_argument_group("print the schedule of one algorithm of the collective")
    add_options(option, "--algorithm", help="an algorithm of the collective, or an MSCCL XML file")
    add_options(option, "--ranks", default=4, help="number of ranks (default 4)")
    add_options(option, "--root", "--in-place")
    option.add_argument("--nodes", type=_nodes, metavar="RANKS", help="ranks of each node, such as 0,1/2,3")
    option.add_argument("--xml", action="store_true", help="print MSCCL XML")


def _nodes(text: str) -> list[list[int]]:
    try:
        return [[int(rank) for rank in node.split(",")] for node in text.split("/")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ranks such as 0,1/2,3, got '{text}'") from None


def _run(args: argparse.Namespace) -> int:
    if args.algorithm is None:
        for name in ("ranks", "root", "in_place", "nodes", "xml"):
            if getattr(args, name) != args.parser.get_default(name):
                args.parser.error(f"--{name.replace('_', '-')} requires --algorithm")
        return _list(args.collective)
    if args.collective is None:
        args.parser.error("--algorithm requires COLLECTIVE")
    algorithm = find_algorithm(
        args.collective, args.algorithm, args.ranks, args.root, args.nodes, in_place=args.in_place
    )
    print(write(algorithm) if args.xml else draw(algorithm), end="" if args.xml else "\n")
    return 0


def _list(collective: str | None) -> int:
    names = TABLE if collective is None else [collective]
    rows = [(name, row.name, row.description, row.best_for) for name in names for row in algorithms(name)]
    print(table(HEADER, rows))
    return 0


def draw(algorithm: Algorithm) -> str:
    """Return a schedule as text: the steps of every lane of every rank in one loop."""
    cost = steps_and_bytes(algorithm)
    root = "" if algorithm.root is None else f", root {algorithm.root}"
    place = ", in place" if algorithm.in_place else ""
    lines = [
        f"{algorithm.collective} {algorithm.name}, {algorithm.ranks} ranks{root}{place}",
        f"chunks per loop: {algorithm.chunks}; latency steps: {cost.steps}",
        f"maximum per rank: messages sent {cost.messages}, bytes sent {cost.sent}, bytes received {cost.received}",
    ]
    for rank, program in enumerate(algorithm.programs):
        scratch = f", scratch for {program.scratch_chunks} chunks" if program.scratch_chunks else ""
        lines += ["", f"rank {rank}{scratch}"]
        for number, lane in enumerate(program.lanes):
            lines.append(f"  lane {number}{_peers(lane)}")
            lines += [f"    {index}  {_describe(step)}" for index, step in enumerate(lane.steps)]
    return "\n".join(lines)


def _peers(lane: Lane) -> str:
    receive = "" if lane.receive is None else f" from {lane.receive}"
    send = "" if lane.send is None else f" to {lane.send}"
    form = ", raw" if lane.raw else ""
    return f":{receive}{send}, channel {lane.channel}{form}" if receive or send else ": local"


def _describe(step: Step) -> str:
    source, target = _range(step.source, step.count), _range(step.target, step.count)
    after = " and ".join(f"lane {lane} step {index}" for lane, index in step.after)
    return STEPS[step.kind].format(source=source, target=target) + (f", after {after}" if after else "")


def _range(place: Place | None, count: int) -> str:
    if place is None or count == 1:
        return str(place)
    return f"{place.buffer}[{place.offset}..{place.offset + count - 1}]"


COMMAND = Command(
    "algorithms",
    "list the algorithms of the collectives, or print the schedule of one",
    "broadcast --algorithm chain --ranks 4",
    _add_arguments,
    _run,
)
