"""The command `explain`: every way to do a collective on a topology, with the time that the cost model predicts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi_gpucomp.collectives.select import CHUNKS, LEAST_CODED
from mpi_gpucomp.collectives.table import TABLE
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.plans import Plans
from mpi_gpucomp.schedule.simulate import simulate
from mpi_gpucomp.tools.asked import add_options, algorithm_of, coding_of, collective_of, topology_of
from mpi_gpucomp.tools.progress import Progress
from mpi_gpucomp.tools.simulate import milliseconds
from mpi_gpucomp.tools.sizes import in_words
from mpi_gpucomp.tools.table import table

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm
    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["add"]

HEADER = ("algorithm", "codec", "chunk", "predicted", "against the best", "busiest")
MOST_MESSAGES = 300_000
"""An algorithm that sends more in a loop is left out: to follow it would take minutes."""


class _Candidate(NamedTuple):
    algorithm: str
    codec: str
    chunk: int
    seconds: float
    busiest: str


def add(commands: Any) -> None:
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
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
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
    entries = Plans(folder, topology.nodes).entries
    found = ((entry.path, entry.algorithm) for entry in entries)
    return [str(path) for path, made in found if (made.collective, made.ranks, made.goal.root) == wanted]


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
