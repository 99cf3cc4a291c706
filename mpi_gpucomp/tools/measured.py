"""`codecs --measure`: puts codecs on the bench one after the other, and prints what was found."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.codec.registry import find, registered
from mpi_gpucomp.device import get_device
from mpi_gpucomp.device.workers import usable_cores
from mpi_gpucomp.tools.measure import Bench
from mpi_gpucomp.tools.progress import Progress
from mpi_gpucomp.tools.table import table
from mpi_gpucomp.tools.values import like_weights, read

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from mpi_gpucomp.codec.base import Codec
    from mpi_gpucomp.device import DType
    from mpi_gpucomp.tools.measure import Measurement

__all__ = ["run"]

BESIDES = ("mpc", "zfp:rate=16", "cast:f32")
"""What is measured unless the user chooses, besides the example of every codec."""

NUMBERS = ("ratio", "in GB/s", "out GB/s", "largest error", "of the range")
FAILED, INTERRUPTED = 1, 130


def run(args: argparse.Namespace) -> int:
    """Measure as the command line says, print what was found, and return the exit code."""
    values = read(Path(args.measure), args.dtype) if args.measure else like_weights(args.dtype)
    codecs = [find(spec) for spec in args.codec] if args.codec else _suitable(values.dtype)
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
    codecs = sorted(map(find, specs), key=lambda codec: list(entries).index(codec.name))
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
