"""The command `codecs`: lists the codecs and whether they run on this machine, or measures them on sample data.

Sample data are the values of a `.npy` file, or random ones that resemble a network's weights.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpi_gpucomp import config
from mpi_gpucomp.cli.command import Command, Progress, add_options, parse_seconds, table
from mpi_gpucomp.cli.doctor import describe_gpu, describe_library, first_gpu
from mpi_gpucomp.codec.registry import get_codec, registered
from mpi_gpucomp.device import DTYPES, Buffer, dtype_of_name, get_device
from mpi_gpucomp.device.buffer import numpy_dtype
from mpi_gpucomp.device.host import HostDevice, usable_cores
from mpi_gpucomp.errors import BufferSpecError, DecodeError, DeviceError, GpucompError, SpecError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence
    from types import TracebackType

    from numpy.typing import NDArray
    from typing_extensions import Self

    from mpi_gpucomp.codec.base import Codec
    from mpi_gpucomp.codec.registry import CodecEntry
    from mpi_gpucomp.device import Device, DType, Memory, Stream

__all__ = [
    "COMMAND",
    "Bench",
    "Measurement",
    "SampleData",
    "Support",
    "largest_error",
    "random_weights",
    "read_sample",
]

ALSO_MEASURED = ("mpc", "zfp:rate=16", "cast:f32")
"""Measured by default, in addition to the example of every codec."""
NUMBERS = ("ratio", "encode GB/s", "decode GB/s", "largest error", "relative error")
PROBE_ELEMENTS = 32
FAILED, INTERRUPTED = 1, 130

DEVIATION = 0.02
GENERATED_BYTES = 4 << 20
GENERATED = ("float16", "bfloat16", "float32", "float64")
HEADERS = (b"\x93NUMPY", b"PK")
"""First bytes of a .npy file, and of an archive of several."""


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
        return _why_not(error)
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


@dataclass(frozen=True)
class SampleData:
    """A one-dimensional array; bfloat16, which numpy does not have, is stored as uint16."""

    array: NDArray[Any]
    dtype: DType
    origin: str

    def __str__(self) -> str:
        """Return the origin, length and type."""
        return f"{self.origin}: {self.array.size} x {self.dtype}"


def random_weights(name: str | None = None) -> SampleData:
    """Return normally distributed values of the named type, by default float32; the same in every call."""
    dtype = dtype_of_name(name or "float32")
    if dtype is None or dtype.name not in GENERATED:
        raise SpecError(
            "option --dtype",
            expected=f"one of {', '.join(GENERATED)} without a file",
            got=str(name),
            remedy="Name a .npy file with values of this type: --measure FILE.",
        )
    drawn = np.random.default_rng(0).normal(0, DEVIATION, GENERATED_BYTES // dtype.itemsize)
    array = _rounded_to_bfloat16(drawn) if dtype.name == "bfloat16" else drawn.astype(dtype.name)
    return SampleData(array, dtype, f"normal(0, {DEVIATION})")


def _rounded_to_bfloat16(drawn: NDArray[np.float64]) -> NDArray[np.uint16]:
    bits = drawn.astype(np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


def read_sample(path: Path, name: str | None = None) -> SampleData:
    """Read a `.npy` file of any shape; `name` is the element type if the file does not have it."""
    array = _load(path)
    if array.size == 0:
        raise _unusable(path, "at least one element", f"shape {array.shape}", "Choose a file with values.")
    array = array.ravel(order="K")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if name is None and array.dtype == np.dtype("V2"):
        name = "bfloat16"  # numpy writes it as two bytes without a type
    return SampleData(*_typed(array, name, path), origin=path.name)


def _load(path: Path) -> NDArray[Any]:
    remedy = "Write one with numpy.save; an array of objects cannot be used."
    try:
        with path.open("rb") as file:
            has_header = file.read(6).startswith(HEADERS)
        if not has_header:  # numpy would take it for a pickle, and recommend to load it as one
            raise _unusable(path, "a .npy file", "a file without its header", remedy)
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        got = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
        got = "an array of objects" if got.startswith("Object arrays") else got.rstrip(".")
        raise _unusable(path, "a .npy file", got, remedy) from error
    if isinstance(array, np.ndarray):
        return array
    array.close()
    raise _unusable(path, "a .npy file with one array", "an archive of several", remedy)


def _typed(array: NDArray[Any], name: str | None, path: Path) -> tuple[NDArray[Any], DType]:
    if name is None:
        try:
            return array, numpy_dtype(array.dtype)
        except BufferSpecError as error:
            remedy = "Convert the array, or name the element type with --dtype."
            raise _unusable(path, error.expected, error.got, remedy) from error
    dtype = dtype_of_name(name)
    if dtype is None or dtype.itemsize != array.dtype.itemsize:
        size = array.dtype.itemsize
        remedy = "--dtype reinterprets the elements of the file; it does not convert them."
        raise _unusable(path, f"a type of {size} bytes, like its {array.dtype}", name, remedy)
    return array.view("uint16" if name == "bfloat16" else name), dtype


def _unusable(path: Path, expected: str, got: str, remedy: str) -> GpucompError:
    return BufferSpecError(f"file {path}", expected=expected, got=got, remedy=remedy)


def largest_error(raw: NDArray[Any], decoded: NDArray[Any], dtype: DType) -> tuple[float, float]:
    """Return the largest error, absolute and relative to the range of the raw values.

    It is infinite if a value became NaN or infinite, or no longer is.
    """
    if raw.tobytes() == decoded.tobytes():
        return 0.0, 0.0
    before, after = _widened(raw, dtype), _widened(decoded, dtype)
    with np.errstate(all="ignore"):
        same = (before == after) | (np.isnan(before) & np.isnan(after))
        worst = float(np.nan_to_num(np.where(same, 0, abs(after - before)), nan=np.inf, posinf=np.inf).max())
        finite = before[np.isfinite(before)]
        span = float(np.ptp(finite)) if finite.size and before.dtype.kind == "f" else 0.0
    return worst, worst / span if span else worst and np.inf


def _widened(array: NDArray[Any], dtype: DType) -> NDArray[Any]:
    if dtype.name == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.complex128 if dtype.kind == "c" else np.float64)


SHORT = {"the package cramjam": "needs cramjam", "the package nvidia.nvcomp": "needs nvCOMP"}
"""Short texts for what an error expected."""


class Support(NamedTuple):
    """Whether a codec runs on a device: `yes` or the reason why not, and a remedy."""

    status: str
    remedy: str = ""


def _why_not(error: GpucompError) -> Support:
    """Return what is missing according to an error, in a few words."""
    if error.topic in ("host library", f"environment variable {config.HOST_LIBRARY.variable}"):
        return Support("needs the host library", error.remedy)
    if error.expected == "a stream of a GPU":
        return Support("needs a GPU")
    return Support(SHORT.get(error.expected, f"needs {error.expected}"), error.remedy)


POISON = 0xA5
"""The output of a decoder is filled with it first, so that elements that were not written are detected."""


@dataclass
class Measurement:
    """The results of one codec; None where there is none."""

    codec: str
    lossless: bool
    chunks: int
    raw_chunks: int = 0
    """Chunks that are sent raw: they do not shrink, or the codec cannot encode them."""
    ratio: float | None = None
    """Raw bytes per byte sent."""
    encode_speed: float | None = None
    """Raw bytes per second."""
    decode_speed: float | None = None
    largest_error: float | None = None
    largest_relative_error: float | None = None
    """The error relative to the range of its chunk."""
    wrong: str = ""
    """The defect of the codec, if one was found."""
    unavailable: str = ""
    """The reason why it could not be measured."""


class _RoundTrip(NamedTuple):
    """One chunk encoded and decoded: its encoded size, None if it must be sent raw, and the seconds of each."""

    size: int | None
    encode: float
    decode: float


class Bench:
    """Sample data on a device, in chunks, to encode and decode with codecs."""

    def __init__(self, values: SampleData, device: Device, chunk_bytes: int, *, threads: bool = False) -> None:
        """Copy the values to the device; `threads` uses all cores of the host."""
        self._values, self._device = values, device
        self._stream = _stream(device, threads)
        self._raw = device.alloc(values.array.nbytes)
        self._stream.copy(self._raw.address, values.array.ctypes.data, values.array.nbytes)
        self._chunks = self._split(max(1, chunk_bytes // values.dtype.itemsize))
        self._decoded = device.alloc(self._chunks[0].nbytes)

    def _split(self, count: int) -> list[Buffer]:
        total = self._values.array.size
        whole = Buffer(self._raw.address, self._values.dtype, (total,), device=self._device.name, owner=self._raw)
        return [whole.slice(start, min(count, total - start)) for start in range(0, total, count)]

    @property
    def chunks(self) -> int:
        """Return the number of chunks."""
        return len(self._chunks)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the stream and free the memory."""
        self._stream.close()
        self._raw.release()
        self._decoded.release()

    def measure(self, codec: Codec, seconds: float) -> Measurement:
        """Check the codec on every chunk, then time it for about this many seconds, at least once."""
        found = Measurement(codec.spec, codec.lossless, self.chunks)
        try:
            codec.check_dtype(self._values.dtype)
            with self._device.alloc(codec.max_encoded(self._chunks[0].count, self._values.dtype)) as room:
                self._check(codec, room, found)
                self._time(codec, room, found, seconds)
        except (BufferSpecError, DeviceError) as error:
            found.unavailable = ". ".join(filter(None, _why_not(error)))
        except DecodeError as error:
            found.wrong = f"cannot decode its own output: {error.got}"
        return found

    def _check(self, codec: Codec, room: Memory, found: Measurement) -> None:
        errors = [(0.0, 0.0)]
        sent = 0
        for chunk in self._chunks:
            self._stream.fill(self._decoded.address, POISON, chunk.nbytes)
            size = self._round_trip(codec, room, chunk).size
            raw = size is None or size >= chunk.nbytes
            found.raw_chunks += raw
            sent += chunk.nbytes if size is None or raw else size
            if size is not None:
                raw_values, decoded = self._raw_and_decoded(chunk)
                errors.append(largest_error(raw_values, decoded, chunk.dtype))
                if codec.lossless and raw_values.tobytes() != decoded.tobytes():
                    found.wrong = "is not lossless"
        found.ratio = self._raw.nbytes / sent
        found.largest_error, found.largest_relative_error = map(max, zip(*errors, strict=True))

    def _raw_and_decoded(self, chunk: Buffer) -> tuple[NDArray[Any], NDArray[Any]]:
        start = (chunk.address - self._raw.address) // chunk.dtype.itemsize
        raw = self._values.array[start : start + chunk.count]
        decoded = np.empty_like(raw)
        self._stream.copy(decoded.ctypes.data, self._decoded.address, decoded.nbytes)
        self._stream.synchronize()
        return raw, decoded

    def _time(self, codec: Codec, room: Memory, found: Measurement, seconds: float) -> None:
        passes: list[tuple[float, float]] = []
        decoded = 0
        end = perf_counter() + seconds
        while not passes or perf_counter() < end:
            trips = [self._round_trip(codec, room, chunk) for chunk in self._chunks]
            passes.append((sum(trip.encode for trip in trips), sum(trip.decode for trip in trips)))
            kept = zip(trips, self._chunks, strict=True)
            decoded = sum(chunk.nbytes for trip, chunk in kept if trip.size is not None)
        encoding, decoding = map(median, zip(*passes, strict=True))
        found.encode_speed = self._raw.nbytes / encoding
        found.decode_speed = decoded / decoding if decoded else None

    def _round_trip(self, codec: Codec, room: Memory, chunk: Buffer) -> _RoundTrip:
        to = Buffer(self._decoded.address, chunk.dtype, chunk.shape, device=chunk.device, owner=self._decoded)
        start = perf_counter()
        size = codec.encode(chunk, room, self._stream).result()
        middle = perf_counter()
        if size is not None:
            codec.decode(room, size, to, self._stream).result()
        return _RoundTrip(size, middle - start, perf_counter() - middle)


def _stream(device: Device, threads: bool) -> Stream:
    return device.stream(inline=not threads) if isinstance(device, HostDevice) else device.stream()


COMMAND = Command(
    "codecs",
    "list the codecs and whether they run on this machine, or measure them",
    "--measure weights.npy --codec split zfp:rate=8",
    _add_arguments,
    _run,
)
