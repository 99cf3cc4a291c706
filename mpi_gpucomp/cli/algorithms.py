"""The command `algorithms`: lists the algorithms of the collectives, or draws the schedule of one."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.cli.output import table
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.algorithms import TABLE, algorithms, build
from mpi_gpucomp.schedule.cost import steps_and_bytes
from mpi_gpucomp.schedule.msccl_xml import write

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm, Lane, Place, Step

__all__ = ["add", "draw"]

HEADER = ("collective", "algorithm", "what it does", "good for")
IN_WORDS = {
    "s": "send {source}",
    "r": "receive {target}",
    "rcs": "receive {target}, send it on",
    "rrs": "receive, add {source}, send on",
    "rrc": "receive, add {source}, keep in {target}",
    "rrcs": "receive, add {source}, keep in {target}, send on",
    "cpy": "copy {source} to {target}",
    "re": "add {source} to {target}",
    "nop": "wait",
}


def add(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    parser = commands.add_parser(
        "algorithms",
        help="list the algorithms of the collectives, or draw one",
        description="List the algorithms of all collectives or of one, or draw one: algorithms show NAME --ranks 4.",
    )
    parser.add_argument("what", nargs="?", metavar="COLLECTIVE | show", help="a collective, or show")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the algorithm to show")
    option = parser.add_argument_group("showing").add_argument
    option("--collective", help="whose algorithm it is, where several have one of this name")
    option("--ranks", type=int, default=4, metavar="N", help="number of ranks (default 4)")
    option("--root", type=int, default=0, metavar="RANK", help="root (default 0)")
    option("--nodes", type=_nodes, metavar="RANKS", help="ranks of each node, such as 0,1/2,3")
    option("--in-place", action="store_true", help="with input and output in one memory")
    option("--xml", action="store_true", help="print MSCCL XML")
    parser.set_defaults(run=partial(_run, parser))


def _nodes(text: str) -> list[list[int]]:
    try:
        return [[int(rank) for rank in node.split(",")] for node in text.split("/")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ranks such as 0,1/2,3, got '{text}'") from None


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if args.what == "show":
        if args.name is None:
            parser.error("show wants the NAME of an algorithm")
        return _show(args)
    options = ("collective", "ranks", "root", "nodes", "in_place", "xml")
    given = [name for name in options if getattr(args, name) != parser.get_default(name)]
    if args.name is not None or given:
        parser.error(f"{'NAME' if args.name is not None else '--' + given[0].replace('_', '-')} goes with show")
    return _list(args.what)


def _list(collective: str | None) -> int:
    wanted = TABLE if collective is None else [collective]
    rows = [(name, row.name, row.description, row.best_for) for name in wanted for row in algorithms(name)]
    print(table(HEADER, rows))
    return 0


def _show(args: argparse.Namespace) -> int:
    collective = args.collective or _only_one_with(args.name)
    algorithm = build(collective, args.name, args.ranks, args.root, args.nodes, args.in_place)
    print(write(algorithm) if args.xml else draw(algorithm), end="" if args.xml else "\n")
    return 0


def _only_one_with(name: str) -> str:
    having = [collective for collective, rows in TABLE.items() if name in rows]
    if len(having) == 1:
        return having[0]
    if having:
        remedy = f"Choose one with --collective, such as --collective {having[0]}."
        raise SpecError("option --collective", expected=f"one of {', '.join(having)}", got="none", remedy=remedy)
    names = dict.fromkeys(name for rows in TABLE.values() for name in rows)
    remedy = "List them with `python -m mpi_gpucomp algorithms`."
    raise SpecError("algorithm", expected=f"one of {', '.join(names)}", got=f"'{name}'", remedy=remedy)


def draw(algorithm: Algorithm) -> str:
    """Draw a schedule as text: what every lane of every rank does in a loop."""
    cost = steps_and_bytes(algorithm)
    root = "" if algorithm.root is None else f", root {algorithm.root}"
    place = ", in place" if algorithm.in_place else ""
    lines = [
        f"{algorithm.collective} {algorithm.name}, {algorithm.ranks} ranks{root}{place}",
        f"chunks in a loop: {algorithm.chunks}; longest chain of messages: {cost.steps}",
        f"most for one rank: messages sent {cost.messages}, bytes sent {cost.sent}, bytes received {cost.received}",
    ]
    for rank, program in enumerate(algorithm.programs):
        scratch = f", scratch for {program.scratch_chunks} chunks" if program.scratch_chunks else ""
        lines += ["", f"rank {rank}{scratch}"]
        for number, lane in enumerate(program.lanes):
            lines.append(f"  lane {number}{_peers(lane)}")
            lines += [f"    {index}  {_in_words(step)}" for index, step in enumerate(lane.steps)]
    return "\n".join(lines)


def _peers(lane: Lane) -> str:
    receive = "" if lane.receive is None else f" from {lane.receive}"
    send = "" if lane.send is None else f" to {lane.send}"
    form = ", not encoded" if lane.raw else ""
    return f":{receive}{send}, channel {lane.channel}{form}" if receive or send else ": inside the rank"


def _in_words(step: Step) -> str:
    source, target = _range(step.source, step.count), _range(step.target, step.count)
    after = " and ".join(f"lane {lane} step {index}" for lane, index in step.after)
    return IN_WORDS[step.kind].format(source=source, target=target) + (f", after {after}" if after else "")


def _range(place: Place | None, count: int) -> str:
    if place is None or count == 1:
        return str(place)
    return f"{place.buffer}[{place.offset}..{place.offset + count - 1}]"
