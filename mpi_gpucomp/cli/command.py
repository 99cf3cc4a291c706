"""What commands have in common: the record of a command, options and what they name, tables, and a progress bar."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TextIO

import numpy as np

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.errors import ScheduleError, SpecError
from mpi_gpucomp.schedule import msccl_xml as xml
from mpi_gpucomp.schedule.algorithms import TABLE, build
from mpi_gpucomp.schedule.cost import default_chunk_bytes
from mpi_gpucomp.schedule.ir import COLLECTIVES
from mpi_gpucomp.schedule.topology import PRESETS, preset, read_topology
from mpi_gpucomp.schedule.verify import checked

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from types import TracebackType

    from mpi4py import MPI
    from typing_extensions import Self

    from mpi_gpucomp.schedule.cost import CodecCost
    from mpi_gpucomp.schedule.ir import Algorithm
    from mpi_gpucomp.schedule.topology import Topology

__all__ = [
    "CLEAR",
    "Command",
    "CommandLineParser",
    "Progress",
    "add_collective",
    "add_options",
    "allgather_json",
    "chunk_bytes",
    "find_algorithm",
    "find_codec_cost",
    "find_collective",
    "find_topology",
    "format_size",
    "milliseconds",
    "parse_count",
    "parse_seconds",
    "parse_size",
    "table",
    "with_suggestion",
]

DEFAULT_PRESET, DEFAULT_RANKS = "gigabit", 4

GAP = "  "


class Command(NamedTuple):
    """One command: how `--help` presents it, its arguments, and the function that runs it."""

    name: str
    summary: str
    """One line, for the list of commands."""
    example: str
    """Arguments of an invocation that makes sense."""
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    """Returns the exit code; `args.parser.error` reports options that do not go together."""
    mpirun: int = 0
    """The number of ranks to start in the example, for a command that runs under mpirun."""


class CommandLineParser(ArgumentParser):
    """A parser whose errors about unknown commands and options name what may have been meant."""

    def error(self, message: str) -> NoReturn:
        """Print usage and error, and exit."""
        super().error(with_suggestion(message, self))


def with_suggestion(message: str, parser: ArgumentParser) -> str:
    """Add the nearest command, option or choice of a parser to its error about an unknown one."""
    unknown = re.search(r"unrecognized arguments: (-[^\s=]+)|invalid choice: '([^']+)'", message)
    near = get_close_matches(unknown[1] or unknown[2], _words(parser), 1) if unknown else []
    return f"{message}. Did you mean {near[0]}?" if near else message


def _words(parser: ArgumentParser) -> Iterator[str]:
    """Yield all options and choices of a parser and its sub-parsers."""
    for action in parser._actions:
        yield from action.option_strings
        for choice in action.choices or ():
            yield str(choice)
        parsers = action.choices.values() if isinstance(action.choices, dict) else ()
        for sub in parsers:
            yield from _words(sub)


UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 512K, 64MB or 1GiB; units are powers of 1024."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]?)(?:I?B)?\s*", text.upper(), re.ASCII)
    nbytes = int(float(match[1]) * (1 << UNITS[match[2]])) if match else 0
    if nbytes < 1:
        raise ArgumentTypeError(f"expected a size such as 512K or 64MB, got '{text}'")
    return nbytes


def parse_count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise ArgumentTypeError(f"expected a whole number of at least 1, got '{text}'")
    return int(text)


def parse_seconds(text: str) -> float:
    """Return a number of seconds, 0 or more."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < inf:
        raise ArgumentTypeError(f"expected a number of seconds, 0 or more, got '{text}'")
    return seconds


def format_size(nbytes: float) -> str:
    """Return a size with its unit."""
    for unit, power in reversed(UNITS.items()):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.4g} {unit}B"
    return f"{nbytes:.4g} B"


SHARED: dict[str, dict[str, Any]] = {
    "--topology": {
        "metavar": "FILE",
        "help": f"a topology: a file of `profile`, or one of {', '.join(PRESETS)} (default: {DEFAULT_PRESET})",
    },
    "--ranks": {
        "type": parse_count,
        "metavar": "N",
        "help": f"number of ranks (default: the topology's, or {DEFAULT_RANKS})",
    },
    "--root": {"type": int, "default": 0, "metavar": "RANK", "help": "root of the collective (default 0)"},
    "--size": {
        "type": parse_size,
        "default": 64 << 20,
        "metavar": "SIZE",
        "help": "message size (default 64MB)",
    },
    "--algorithm": {
        "metavar": "NAME",
        "help": "an algorithm of `algorithms` (default: the first), or an XML file",
    },
    "--codec": {"metavar": "SPEC", "help": "a codec of `codecs`, such as zfp:rate=8 (default none)"},
    "--chunk": {"type": parse_size, "metavar": "SIZE", "help": "size of a chunk (default: as a communicator chooses)"},
    "--in-place": {"action": "store_true", "help": "input and output share one buffer"},
    "--plans": {"type": Path, "metavar": "DIR", "help": "directory of a schedule library"},
    "--output": {"type": Path, "metavar": "FILE", "help": "file to write"},
    "--json": {"action": "store_true", "help": "print JSON"},
}
"""Options that several commands have: the same flags, type and meaning in all of them."""
SHORT = {"--output": "-o"}


def add_options(parser: Any, *names: str, **changes: Any) -> None:
    """Add shared options, with other help, defaults or counts where `changes` has them."""
    for name in names:
        flags = (SHORT[name], name) if name in SHORT else (name,)
        parser.add_argument(*flags, **SHARED[name] | changes)


def add_collective(parser: ArgumentParser, **changes: Any) -> None:
    """Add the positional argument of commands about one collective."""
    shared: dict[str, Any] = {
        "metavar": "COLLECTIVE",
        "type": find_collective,
        "help": "a collective, such as bcast, allreduce or Allgather",
    }
    parser.add_argument("collective", **shared | changes)


def find_collective(name: str) -> str:
    """Return the collective with this name, which may also be MPI's or mpi4py's: broadcast, bcast, Bcast."""
    names = {
        alias.lower(): one.name for one in COLLECTIVES.values() for alias in (one.name, one.mpi_name, *one.methods)
    }
    if name.lower() not in names:
        raise ArgumentTypeError(f"expected one of {', '.join(COLLECTIVES)}, got '{name}'")
    return names[name.lower()]


def find_topology(args: Namespace) -> Topology:
    """Return the topology of --topology and --ranks."""
    if args.topology is None:
        return preset(DEFAULT_PRESET, args.ranks or DEFAULT_RANKS)
    if args.topology in PRESETS:
        if args.ranks is None:
            expected, remedy = "a number of ranks for a preset", "Add it: --ranks 16."
            raise SpecError("option --ranks", expected=expected, got="none", remedy=remedy)
        return preset(args.topology, args.ranks)
    if "." not in args.topology and "/" not in args.topology:
        return preset(args.topology, args.ranks or 1)  # the error for an unknown preset
    topology = read_topology(args.topology)
    if args.ranks not in (None, topology.ranks):
        expected = f"{topology.ranks}, as {args.topology} has"
        raise SpecError("option --ranks", expected=expected, got=str(args.ranks), remedy="Omit the option.")
    return topology


def find_algorithm(
    collective: str,
    name: str | None,
    ranks: int,
    root: int = 0,
    nodes: Sequence[Iterable[int]] | None = None,
    in_place: bool = False,
) -> Algorithm:
    """Return a built-in algorithm, by default the first of the collective, or the algorithm of an MSCCL XML file."""
    if name is None or not name.endswith(".xml"):
        return build(collective, name or next(iter(TABLE[collective])), ranks, root, nodes, in_place)
    algorithm = checked(xml.read(Path(name)))
    if algorithm.collective != collective:
        remedy = f"Name its collective: {algorithm.collective}."
        raise ScheduleError(f"file {name}", expected=collective, got=algorithm.collective, remedy=remedy)
    return algorithm


def find_codec_cost(spec: str | None, topology: Topology) -> CodecCost | None:
    """Return the cost of a codec on a topology; None for no codec."""
    if spec in (None, "none"):
        return None
    if spec not in topology.codecs:
        known = ", ".join(topology.codecs) or "none"
        raise SpecError(
            f"codec {spec}",
            expected=f"a codec that topology {topology.name} has costs for: {known}",
            got="no costs",
            remedy="Add its speeds and its ratio to the file, under codecs.",
        )
    return topology.codecs[spec]


def chunk_bytes(chunk: int | None, size: int, spec: str | None, topology: Topology) -> int:
    """Return the bytes of a chunk: as given, or as a communicator chooses for this size, codec and device."""
    coded = get_codec(spec or "none").name != "none"
    return chunk or default_chunk_bytes(size, coded=coded, gpu=topology.staging is not None)


def allgather_json(comm: MPI.Intracomm, value: Any) -> list[Any]:
    """Return the values of all ranks; sent as JSON, since nothing from a peer may be unpickled."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([text.size], np.int64), sizes)
    parts = np.empty(int(sizes.sum()), np.uint8)
    comm.Allgatherv(text, [parts, sizes.tolist()])
    ends = np.cumsum(sizes).tolist()
    return [json.loads(parts[end - size : end].tobytes()) for size, end in zip(sizes.tolist(), ends, strict=True)]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> str:
    """Format rows below their header; the columns named in `right` are right-aligned."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    align = [str.rjust if name in right else str.ljust for name in header]
    return "\n".join(
        GAP.join(pad(cell, width) for pad, cell, width in zip(align, cells, widths, strict=True)).rstrip()
        for cells in lines
    )


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds."""
    return f"{seconds * 1e3:.4g} ms"


WIDTH = 24
CLEAR = "\r\x1b[K"
"""Return to the start of the line and erase it."""


class Progress:
    """A progress bar, drawn on a terminal only and erased at the end of the `with` block."""

    def __init__(self, total: int, terminal: TextIO | None = None) -> None:
        """Expect `total` steps; draw on `terminal`, by default standard error."""
        self._total, self._started = total, 0
        self._terminal = sys.stderr if terminal is None else terminal
        self._shown = self._terminal.isatty()

    def start(self, step: str) -> None:
        """Show that the next step, with this name, begins."""
        filled = WIDTH * self._started // max(1, self._total)
        self._started += 1
        self._write(f"{CLEAR}[{'#' * filled}{'.' * (WIDTH - filled)}] {self._started} of {self._total}: {step}")

    def clear(self) -> None:
        """Erase the line, so that other output can be printed."""
        self._write(CLEAR)

    def _write(self, text: str) -> None:
        if self._shown:
            self._terminal.write(text)
            self._terminal.flush()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Erase the line."""
        self.clear()
