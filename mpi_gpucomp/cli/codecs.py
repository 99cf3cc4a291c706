"""The command `codecs`: lists the codecs and whether they run on this machine, or measures them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.cli.codec_bench import Bench, Support, random_weights, read_sample, why_not
from mpi_gpucomp.cli.doctor import describe_gpu, describe_library, first_gpu
from mpi_gpucomp.cli.options import Command, add_options, parse_seconds
from mpi_gpucomp.cli.output import Progress, table
from mpi_gpucomp.codec.registry import get_codec, registered
from mpi_gpucomp.device import DTYPES, Buffer, dtype_of_name, get_device
from mpi_gpucomp.device.host import HostDevice, usable_cores
from mpi_gpucomp.errors import DeviceError, GpucompError, SpecError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

    from mpi_gpucomp.cli.codec_bench import Measurement
    from mpi_gpucomp.codec.base import Codec
    from mpi_gpucomp.codec.registry import CodecEntry
    from mpi_gpucomp.device import Device, DType

__all__ = ["COMMAND"]

ALSO_MEASURED = ("mpc", "zfp:rate=16", "cast:f32")
"""Measured by default, in addition to the example of every codec."""
NUMBERS = ("ratio", "encode GB/s", "decode GB/s", "largest error", "relative error")
PROBE_ELEMENTS = 32
FAILED, INTERRUPTED = 1, 130


def _add_arguments(parser: ArgumentParser) -> None:
    add_options(parser, "--json")
    group = parser.add_argument_group("measure ratio, speeds and largest error")
    option = group.add_argument
    option("--measure", nargs="?", const="", metavar="FILE", help="a .npy file (default: random weights)")
    add_options(group, "--codec", nargs="+", action="extend", help="codecs to measure, such as zfp:rate=8 split")
    add_options(group, "--chunk", default=1 << 20, help="size of a chunk (default 1MB)")
    types = [dtype.name for dtype in DTYPES]
    option("--dtype", choices=types, metavar="TYPE", help="element type, if the file does not have it")
    option("--device", default="host", help="host or cuda:N (default host)")
    option("--threads", action="store_true", help="use all cores of the host")
    option("--seconds", type=parse_seconds, default=0.2, metavar="SECONDS", help="time per codec (default 0.2)")


def _run(args: Namespace) -> int:
    if args.measure is not None:
        return _measure(args)
    for name in ("codec", "chunk", "dtype", "device", "threads", "seconds"):
        if getattr(args, name) != args.parser.get_default(name):
            args.parser.error(f"--{name} requires --measure")
    return _list(args.json)


def _list(as_json: bool) -> int:
    entries = registered()
    gpu = first_gpu()
    places = {"host": get_device("host"), "GPU": gpu}
    rows: list[dict[str, str]] = []
    notes: dict[str, list[str]] = {}
    with Progress(len(entries)) as progress:
        for name, entry in entries.items():
            progress.start(name)
            rows.append(_codec_row(name, entry, places, notes))
    head = {"host library": describe_library(), "GPU": describe_gpu(gpu)}
    lines = [f"{', '.join(cases)}: {remedy}" for remedy, cases in notes.items()]
    if as_json:
        print(json.dumps({**head, "codecs": rows, "notes": lines}, indent=2))
        return 0
    print(*(f"{name}: {text}" for name, text in head.items()), "", sep="\n")
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    if lines:
        print("", *lines, sep="\n")
    return 0


def _codec_row(
    name: str, entry: CodecEntry, places: dict[str, Device | DeviceError], notes: dict[str, list[str]]
) -> dict[str, str]:
    """Return the row of a codec, and add the remedies for devices that it does not run on to `notes`."""
    try:
        codec = get_codec(entry.example)
    except SpecError as error:  # a user's codec without a valid example
        notes.setdefault(str(error), []).append(name)
        return {"codec": name, "lossless": "?", "types": "?", **dict.fromkeys(places, "?"), "best for": entry.purpose}
    row = {"codec": entry.example, "lossless": "yes" if codec.lossless else "no", "types": _types(codec)}
    for place, device in places.items():
        row[place], remedy = _probe(codec, device)
        if remedy:
            notes.setdefault(remedy, []).append(f"{name} on the {place}")
    return {**row, "best for": entry.purpose}


def _types(codec: Codec) -> str:
    if len(codec.dtypes) == len(DTYPES):
        return "any"
    known = [dtype_of_name(name) for name in codec.dtypes]
    return " ".join(dtype.suffix for dtype in known if dtype is not None)


def _probe(codec: Codec, device: Device | DeviceError) -> Support:
    """Encode a few elements to find out whether a codec runs on a device."""
    if isinstance(device, DeviceError):
        return Support("no GPU")
    try:
        _encode(codec, device)
    except GpucompError as error:
        return why_not(error)
    except Exception as error:  # a defect of one codec, or of its library, must not hide the other codecs
        return Support("fails", f"{type(error).__name__}: {error}".partition("\n")[0])
    return Support("yes")


def _encode(codec: Codec, device: Device) -> None:
    dtype = dtype_of_name(codec.dtypes[0])
    assert dtype is not None, f"unknown element type {codec.dtypes[0]}"
    stream = device.stream(inline=True) if isinstance(device, HostDevice) else device.stream()
    nbytes = PROBE_ELEMENTS * dtype.itemsize
    with device.alloc(nbytes) as raw, device.alloc(codec.max_encoded(PROBE_ELEMENTS, dtype)) as room:
        stream.fill(raw.address, 0, nbytes)
        source = Buffer(raw.address, dtype, (PROBE_ELEMENTS,), device=device.name, owner=raw)
        codec.encode(source, room, stream).result()
        stream.close()


def _measure(args: Namespace) -> int:
    values = read_sample(Path(args.measure), args.dtype) if args.measure else random_weights(args.dtype)
    codecs = [get_codec(spec) for spec in args.codec] if args.codec else _suitable(values.dtype)
    results: list[Measurement] = []
    with Bench(values, get_device(args.device), args.chunk, threads=args.threads) as bench:
        complete = _measure_all(bench, codecs, args.seconds, results)
        about = f"{values} in chunks of {args.chunk} bytes on {_place_name(args)}"
    if args.json:
        print(json.dumps({"values": about, "codecs": [_json(measurement) for measurement in results]}, indent=2))
    else:
        print(about, "", table(("codec", *NUMBERS, "note"), [_row(m) for m in results], right=NUMBERS), sep="\n")
    if not complete:
        print(f"interrupted: {len(results)} of {len(codecs)} codecs measured", file=sys.stderr)
        return INTERRUPTED
    return FAILED if any(measurement.wrong for measurement in results) else 0


def _suitable(dtype: DType) -> list[Codec]:
    """Return the codecs for elements of this type, in the order of the registry."""
    entries = registered()
    specs = [*(entry.example for entry in entries.values()), *ALSO_MEASURED]
    codecs = sorted(map(get_codec, specs), key=lambda codec: list(entries).index(codec.name))
    return [codec for codec in codecs if dtype.name in codec.dtypes]


def _measure_all(bench: Bench, codecs: Sequence[Codec], seconds: float, results: list[Measurement]) -> bool:
    """Append the measurements of codecs to `results`; return False if interrupted."""
    try:
        with Progress(len(codecs)) as progress:
            for codec in codecs:
                progress.start(codec.spec)
                results.append(bench.measure(codec, seconds))
    except KeyboardInterrupt:
        return False
    return True


def _place_name(args: Namespace) -> str:
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


def _json(found: Measurement) -> dict[str, Any]:
    """Return a measurement for JSON, which has no infinity."""
    facts = asdict(found).items()
    return {key: str(value) if isinstance(value, float) and not isfinite(value) else value for key, value in facts}


COMMAND = Command(
    "codecs",
    "list the codecs and whether they run on this machine, or measure them",
    "--measure weights.npy --codec split zfp:rate=8",
    _add_arguments,
    _run,
)
