"""What the commands about topologies and schedules are asked for: options that they have in common."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.errors import ScheduleError, SpecError
from mpi_gpucomp.schedule import msccl_xml as xml
from mpi_gpucomp.schedule.algorithms import TABLE, build
from mpi_gpucomp.schedule.cost import default_chunk_bytes
from mpi_gpucomp.schedule.topology import PRESETS, preset, read_topology
from mpi_gpucomp.schedule.verify import checked

if TYPE_CHECKING:
    import argparse

    from mpi_gpucomp.schedule.cost import CodecCost
    from mpi_gpucomp.schedule.ir import Algorithm
    from mpi_gpucomp.schedule.topology import Topology

__all__ = [
    "add_options",
    "algorithm_of",
    "chunk_of",
    "coding_of",
    "collective_of",
    "in_words",
    "parse_size",
    "topology_of",
]


# Sizes of messages as people write them: 512K, 64MB, 1GiB; all in powers of 1024, as in the benchmarks.

UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


def parse_size(text: str) -> int:
    """Return the bytes that a text means."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]?)(?:I?B)?\s*", text.upper())
    nbytes = int(float(match[1]) * (1 << UNITS[match[2]])) if match else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 512K or 64MB, got '{text}'")
    return nbytes


def in_words(nbytes: float) -> str:
    """Write a size with the unit that suits it."""
    for unit, power in reversed(UNITS.items()):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.4g} {unit}B"
    return f"{nbytes:.4g} B"


BCAST = "bcast"
USUAL, USUAL_RANKS = "gigabit", 4


def add_options(parser: argparse.ArgumentParser, *, size: bool = True) -> Any:
    """Add the options that say on which machines, with how many ranks, and what."""
    option = parser.add_argument
    presets = ", ".join(PRESETS)
    option("--topology", metavar="FILE", help=f"a file of `profile`, or one of {presets} (default: {USUAL}, 4 ranks)")
    option("--ranks", type=int, metavar="N", help="number of ranks; a file says it itself")
    option("--root", type=int, default=0, metavar="RANK", help="root (default 0)")
    if size:
        option("--size", type=parse_size, default=64 << 20, metavar="BYTES", help="of the message (default 64MB)")
    return option


def topology_of(args: argparse.Namespace) -> Topology:
    """Return the topology that was asked for."""
    if args.topology is None:
        return preset(USUAL, args.ranks or USUAL_RANKS)
    if args.topology in PRESETS:
        if args.ranks is None:
            expected, remedy = "a number of ranks for a preset", "Say how many: --ranks 16."
            raise SpecError("option --ranks", expected=expected, got="none", remedy=remedy)
        return preset(args.topology, args.ranks)
    if "." not in args.topology and "/" not in args.topology:
        return preset(args.topology, args.ranks or 1)
    topology = read_topology(args.topology)
    if args.ranks not in (None, topology.ranks):
        expected = f"{topology.ranks}, as {args.topology} has"
        raise SpecError("option --ranks", expected=expected, got=str(args.ranks), remedy="Leave the option out.")
    return topology


def collective_of(name: str) -> str:
    """Return a collective by its name, of which bcast is short."""
    known = "broadcast" if name == BCAST else name
    if known not in TABLE:
        remedy = "List them with `python -m mpi_gpucomp algorithms`."
        raise SpecError("collective", expected=f"one of {', '.join(TABLE)}", got=f"'{name}'", remedy=remedy)
    return known


def algorithm_of(collective: str, name: str | None, topology: Topology, root: int) -> Algorithm:
    """Return an algorithm of the table, or that of an XML file, for the ranks of a topology."""
    if name is None or not name.endswith(".xml"):
        first = next(iter(TABLE[collective]))
        return build(collective, name or first, topology.ranks, root, topology.nodes)
    algorithm = checked(xml.read(Path(name)))
    if algorithm.collective != collective:
        remedy = f"Ask for it: --collective {algorithm.collective}."
        raise ScheduleError(f"file {name}", expected=collective, got=algorithm.collective, remedy=remedy)
    return algorithm


def coding_of(spec: str | None, topology: Topology) -> CodecCost | None:
    """Return a codec in the numbers that the topology has for it; None for none."""
    if spec in (None, "none"):
        return None
    if spec not in topology.codecs:
        known = ", ".join(topology.codecs) or "none"
        raise SpecError(
            f"codec {spec}",
            expected=f"one that topology {topology.name} has figures for: {known}",
            got="no figures",
            remedy="Add its speeds and its ratio to the file, under codecs.",
        )
    return topology.codecs[spec]


def chunk_of(args: argparse.Namespace) -> int:
    """Return the bytes of a chunk: as asked for, or as a communicator would choose."""
    codec = get_codec(args.codec or "none")
    return int(args.chunk or default_chunk_bytes(args.size, coded=codec.name != "none"))
