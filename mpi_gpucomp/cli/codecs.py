"""The command `codecs`: lists the codecs and where they run on this machine, or measures them."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.cli import capabilities as machine
from mpi_gpucomp.cli.codec_bench import Bench
from mpi_gpucomp.cli.output import Progress, table
from mpi_gpucomp.cli.sample_data import like_weights, read
from mpi_gpucomp.codec.registry import get_codec, registered
from mpi_gpucomp.device import DTYPES, dtype_of_name, get_device
from mpi_gpucomp.device.host import usable_cores
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from mpi_gpucomp.cli.codec_bench import Measurement
    from mpi_gpucomp.codec.base import Codec
    from mpi_gpucomp.codec.registry import CodecEntry
    from mpi_gpucomp.device import Device, DType
    from mpi_gpucomp.errors import DeviceError

__all__ = ["add", "run"]


# `codecs --measure`: puts codecs on the bench one after the other, and prints what was found.

BESIDES = ("mpc", "zfp:rate=16", "cast:f32")
"""What is measured unless the user chooses, besides the example of every codec."""

NUMBERS = ("ratio", "in GB/s", "out GB/s", "largest error", "of the range")
FAILED, INTERRUPTED = 1, 130


def run(args: argparse.Namespace) -> int:
    """Measure as the command line says, print what was found, and return the exit code."""
    values = read(Path(args.measure), args.dtype) if args.measure else like_weights(args.dtype)
    codecs = [get_codec(spec) for spec in args.codec] if args.codec else _suitable(values.dtype)
    found: list[Measurement] = []
    with Bench(values, get_device(args.device), args.chunk, threads=args.threads) as bench:
        complete = _measure(bench, codecs, args.seconds, found)
        about = f"{values} in chunks of {args.chunk} bytes on {_place(args)}"
    if args.json:
        print(json.dumps({"values": about, "codecs": [_plain(measurement) for measurement in found]}, indent=2))
    else:
        print(about, "", table(("codec", *NUMBERS, "note"), [_row(m) for m in found], right=NUMBERS), sep="\n")
    if not complete:
        print(f"interrupted: {len(found)} of {len(codecs)} codecs measured", file=sys.stderr)
        return INTERRUPTED
    return FAILED if any(measurement.wrong for measurement in found) else 0


def _suitable(dtype: DType) -> list[Codec]:
    """Return the codecs that take elements of this type, in the order of the registry."""
    entries = registered()
    specs = [*(entry.example for entry in entries.values()), *BESIDES]
    codecs = sorted(map(get_codec, specs), key=lambda codec: list(entries).index(codec.name))
    return [codec for codec in codecs if dtype.name in codec.dtypes]


def _measure(bench: Bench, codecs: Sequence[Codec], seconds: float, found: list[Measurement]) -> bool:
    """Measure codecs into `found`, and say whether it was all of them."""
    try:
        with Progress(len(codecs)) as progress:
            for codec in codecs:
                progress.start(codec.spec)
                found.append(bench.measure(codec, seconds))
    except KeyboardInterrupt:
        return False
    return True


def _place(args: argparse.Namespace) -> str:
    threads = usable_cores() if args.threads else 1
    return f"host, {threads} thread{'s' * (threads > 1)}" if args.device == "host" else str(args.device)


def _row(found: Measurement) -> list[str]:
    errors = (found.largest_error, found.largest_relative_error)
    exact = found.lossless and found.ratio is not None and not found.wrong
    return [
        found.codec,
        _number(found.ratio, ".2f"),
        _number(found.encode_speed, ".2f", 1e-9),
        _number(found.decode_speed, ".2f", 1e-9),
        *(("none", "-") if exact else (_number(error, ".2g") for error in errors)),
        _note(found),
    ]


def _number(value: float | None, form: str, scale: float = 1) -> str:
    return "-" if value is None else format(value * scale, form)


def _note(found: Measurement) -> str:
    if found.wrong:
        return f"WRONG: {found.wrong}"
    if found.raw_chunks:
        return f"{found.raw_chunks} of {found.chunks} chunks raw"
    return found.unavailable


def _plain(found: Measurement) -> dict[str, Any]:
    """Return the measurement as JSON takes it, which has no infinity."""
    facts = asdict(found).items()
    return {key: str(value) if isinstance(value, float) and not isfinite(value) else value for key, value in facts}


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
        return run(args)
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
            rows.append(_codecs_row(name, entry, places, notes))
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


def _codecs_row(
    name: str, entry: CodecEntry, places: dict[str, Device | DeviceError], notes: dict[str, list[str]]
) -> dict[str, str]:
    """Describe a codec, and note what could be done where it does not run."""
    try:
        codec = get_codec(entry.example)
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
