"""The command `codecs`: lists the codecs and where they run on this machine, or measures them."""

from __future__ import annotations

import argparse
import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.codec.registry import find, registered
from mpi_gpucomp.device import DTYPES, dtype_of_name, get_device
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.tools import machine, measured
from mpi_gpucomp.tools.progress import Progress
from mpi_gpucomp.tools.table import table

if TYPE_CHECKING:
    from mpi_gpucomp.codec.base import Codec
    from mpi_gpucomp.codec.registry import Entry
    from mpi_gpucomp.device import Device
    from mpi_gpucomp.errors import DeviceError

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    parser = commands.add_parser(
        "codecs", help="list the codecs, or measure them", description="List the codecs, or measure them."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    option = parser.add_argument_group("measuring: ratio, speed in and out, largest error").add_argument
    option(
        "--measure", nargs="?", const="", metavar="FILE", help="with a .npy file, or values like a network's weights"
    )
    option("--codec", nargs="+", action="extend", metavar="SPEC", help="these codecs alone, such as zfp:rate=8")
    option("--chunk", type=_size, default=1 << 20, metavar="SIZE", help="bytes of a chunk, such as 64KB (default 1MB)")
    types = [dtype.name for dtype in DTYPES]
    option("--dtype", choices=types, metavar="TYPE", help="what the elements are, if the file does not say")
    option("--device", default="host", help="host, the default, or cuda:N")
    option("--threads", action="store_true", help="on the host, share the work among cores")
    option("--seconds", type=float, default=0.2, help="how long to time each codec (default 0.2)")
    parser.set_defaults(run=partial(_run, parser))


def _size(text: str) -> int:
    parts = re.fullmatch(r"(\d+) ?([kmg]?)(?:i?b)?", text, re.IGNORECASE | re.ASCII)
    if parts is None or int(parts[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected bytes such as 65536, 64KB or 1MB (of 1024 KB), got '{text}'")
    return int(parts[1]) << 10 * " kmg".index(parts[2].lower() or " ")


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if args.measure is not None:
        return measured.run(args)
    for name in ("codec", "chunk", "dtype", "device", "threads", "seconds"):
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name} goes with --measure")
    return _list(args.json)


def _list(as_json: bool) -> int:
    entries = registered()
    gpu = machine.first_gpu()
    places = {"host": get_device("host"), "GPU": gpu}
    rows: list[dict[str, str]] = []
    notes: dict[str, list[str]] = {}
    with Progress(len(entries)) as progress:
        for name, entry in entries.items():
            progress.start(name)
            rows.append(_row(name, entry, places, notes))
    head = {"host library": machine.describe_library(), "GPU": machine.describe_gpu(gpu)}
    lines = [f"{', '.join(who)}: {remedy}" for remedy, who in notes.items()]
    if as_json:
        print(json.dumps({**head, "codecs": rows, "notes": lines}, indent=2))
        return 0
    print(*(f"{what}: {said}" for what, said in head.items()), "", sep="\n")
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    if lines:
        print("", *lines, sep="\n")
    return 0


def _row(
    name: str, entry: Entry, places: dict[str, Device | DeviceError], notes: dict[str, list[str]]
) -> dict[str, str]:
    """Describe a codec, and note what could be done where it does not run."""
    try:
        codec = find(entry.example)
    except SpecError as error:  # only a user's own: its example is none
        notes.setdefault(str(error), []).append(name)
        return {"codec": name, "lossless": "?", "types": "?", **dict.fromkeys(places, "?"), "good for": entry.purpose}
    row = {"codec": entry.example, "lossless": "yes" if codec.lossless else "no", "types": _types(codec)}
    for place, device in places.items():
        row[place], remedy = machine.runs_on(codec, device)
        if remedy:
            notes.setdefault(remedy, []).append(f"{name} on the {place}")
    return {**row, "good for": entry.purpose}


def _types(codec: Codec) -> str:
    if len(codec.dtypes) == len(DTYPES):
        return "any"
    known = [dtype_of_name(name) for name in codec.dtypes]
    return " ".join(dtype.suffix for dtype in known if dtype is not None)
