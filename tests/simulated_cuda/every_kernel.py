"""Work that launches every kernel of the library: `python -m tests.simulated_cuda.every_kernel COUNT ...`.

Encodings, decodings and reductions of arrays of these lengths on the simulated GPU must give what they give on the
host. The names of the kernels that were interpreted are printed: a test compares them with the entry points in
`kernels/`.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.codec.delta import Delta
from mpi_gpucomp.codec.frame import HEADER_BYTES, VERSION, _Checksum
from mpi_gpucomp.device import Buffer, Stream, dtype_of_name, get_device
from mpi_gpucomp.device.base import DTYPES
from mpi_gpucomp.device.pack import Bucket, gather, scatter
from tests.golden.make import SPECS, Case, plain_values
from tests.unit.coding import buffer_in, decode, download, encode, upload, values

from .cupy_standin import install
from .machine import machine
from .mutant import use_mutant

__all__ = ["Work", "every_work"]

FRAME_TILE, FRAME_STATE = 4096, 40
"""Bytes of a tile of the checksum, and of the state of frames' kernels (kernels/frame.cu)."""


class Work(NamedTuple):
    """Kernels that belong together, and the bytes of elements that they process."""

    name: str
    nbytes: int
    run: Callable[[Stream], object]


def every_work(count: int) -> Iterator[Work]:
    """Yield work that launches every kernel, on arrays of a number of elements."""
    for spec in SPECS:
        codec = get_codec(spec)
        for name in ("float32", "bfloat16", "float16", "float64"):
            if name in codec.dtypes and spec != "none":
                yield from _coding(spec, name, count)
    for name in ("float32", "uint16", "float64"):
        yield from _delta(name, count)
    for dtype in DTYPES:
        if dtype.kind != "b":
            array = values(dtype.name, count)
            yield Work(f"reduce {dtype.name}", array.nbytes, partial(_reduction, array))
    for name in ("float32", "uint8", "uint16", "float64", "complex128"):
        array = values(name, 2 * count).reshape(count, 2)
        yield Work(f"pack {array.itemsize} bytes", array.nbytes // 2, partial(_packing, array))
    some = np.random.default_rng(count).integers(0, 256, 4 * count, np.uint8)
    yield Work("bucket", some.nbytes, partial(_bucket, some))
    yield Work("checksum", some.nbytes, partial(_checksum, some))
    yield Work("frame", some.nbytes, partial(_frame, some))


def _coding(spec: str, name: str, count: int) -> Iterator[Work]:
    codec = get_codec(spec)
    array = plain_values(Case(spec, name, count))
    host = get_device("host").stream()
    expected = encode(codec, array, host)
    decoded = {op: array.copy() for op in ("replace", "sum", "max")}
    for op, wanted in decoded.items():
        decode(codec, expected, wanted, host, op)

    def encoding(stream: Stream) -> None:
        assert encode(codec, array, stream) == expected, f"{spec} encodes {count} x {name} differently"

    def decoding(op: str, stream: Stream) -> None:
        found = array.copy()
        decode(codec, expected, found, stream, op)
        assert found.tobytes() == decoded[op].tobytes(), f"{spec} decodes {count} x {name} differently, {op}"

    yield Work(f"{spec} {name} encode", array.nbytes, encoding)
    for op in decoded:
        how = "" if op == "replace" else f" and {op}"
        yield Work(f"{spec} {name} decode{how}", array.nbytes, partial(decoding, op))


def _delta(name: str, count: int) -> Iterator[Work]:
    random = np.random.default_rng(count)
    before = random.normal(1000, 100, count)
    base, array = before.astype(name), (before * (1 + random.normal(0, 1e-3, count))).astype(name)
    encoded = _delta_encoded(base, array, get_device("host").stream())

    def encoding(stream: Stream) -> None:
        assert _delta_encoded(base, array, stream) == encoded, f"delta encodes {count} x {name} differently"

    def decoding(stream: Stream) -> None:
        with upload(base, stream) as old, upload(array * 0, stream) as new, upload(encoded, stream) as source:
            Delta(buffer_in(new, array), old).decode(source, len(encoded), buffer_in(new, array), stream).result()
            assert download(new.address, array.nbytes, stream) == array.tobytes(), f"delta of {count} x {name}"

    yield Work(f"delta {name} encode", array.nbytes, encoding)
    yield Work(f"delta {name} decode", array.nbytes, decoding)


def _delta_encoded(base: np.ndarray, array: np.ndarray, stream: Stream) -> bytes:
    with upload(base, stream) as old, upload(array, stream) as new:
        source = buffer_in(new, array)
        codec = Delta(source, old)
        with stream.device.alloc(codec.max_encoded(source.count, source.dtype)) as to:
            size = codec.encode(source, to, stream).result()
            assert size is not None
            return download(to.address, size, stream)


def _reduction(array: np.ndarray, stream: Stream) -> None:
    raw = get_codec("none")
    for op in ("sum", "prod", "max") if array.dtype.kind != "c" else ("sum", "prod"):
        found, wanted = array.copy(), array.copy()
        decode(raw, array.tobytes(), found, stream, op)
        decode(raw, array.tobytes(), wanted, get_device("host").stream(), op)
        assert found.tobytes() == wanted.tobytes(), f"{op} of {array.dtype}"


def _packing(array: np.ndarray, stream: Stream) -> None:
    """Pack the first column, and unpack it to the second one."""
    dtype = dtype_of_name(array.dtype.name)
    assert dtype is not None
    with upload(array, stream) as memory, stream.device.alloc(array.nbytes // 2) as packed:
        columns = [
            Buffer(memory.address + at, dtype, (len(array),), strides=array.strides[:1], device=stream.device.name)
            for at in (0, array.itemsize)
        ]
        gather(columns[0], packed, stream)
        assert download(packed.address, packed.nbytes, stream) == array[:, 0].tobytes()
        scatter(packed, columns[1], stream)
        assert download(memory.address, array.nbytes, stream) == np.repeat(array[:, :1], 2, axis=1).tobytes()


def _bucket(data: np.ndarray, stream: Stream) -> None:
    parts = [data[: data.size // 3], data[data.size // 3 :]]
    memories = [upload(part, stream) for part in parts]
    bucket = Bucket([buffer_in(memory, part) for memory, part in zip(memories, parts, strict=True)])
    with stream.device.alloc(bucket.nbytes) as room:
        bucket.fill(room, stream)
        for memory in memories:
            stream.fill(memory.address, 0, memory.nbytes)
        bucket.empty(room, stream)
        for memory, part in zip(memories, parts, strict=True):
            assert download(memory.address, part.nbytes, stream) == part.tobytes()
            memory.release()


def _checksum(data: np.ndarray, stream: Stream) -> None:
    with upload(data, stream) as memory:
        assert _Checksum(memory.address, data.nbytes, stream).value() == zlib.adler32(data.tobytes())


def _frame(data: np.ndarray, stream: Stream) -> None:
    """Seal a frame, and verify it."""
    nbytes, dtype = data.nbytes, dtype_of_name("uint8")
    assert dtype is not None
    kind = int.from_bytes(struct.pack("<4sBBBB", b"GPCF", VERSION, 2, dtype.code, 0), "little")
    tiles = max(1, -(-nbytes // FRAME_TILE))
    with (
        upload(bytes(HEADER_BYTES) + data.tobytes(), stream) as frame,
        upload(bytes(FRAME_STATE), stream) as state,
        upload(bytes(16), stream) as report,
    ):
        of_frame = (frame.address, state.address, tiles, nbytes)
        stream.launch("frame_seal", tiles, *of_frame, 0, kind, 77, 5, nbytes, report.address)
        assert download(report.address, 16, stream) == struct.pack("<QQ", nbytes, 0)
        stream.launch("frame_verify", tiles, *of_frame, report.address)
        assert download(report.address, 16, stream) == bytes(16), "a frame that is not what was sealed"


def main() -> int:
    """Do all work with each number of elements, and print the kernels that were interpreted; return the exit status."""
    use_mutant()
    install()
    stream = get_device("cuda:0").stream()
    try:
        for count in map(int, sys.argv[1:]):
            for work in every_work(count):
                work.run(stream)
    finally:
        print("\n".join(machine().findings), file=sys.stderr)
    print("\n".join(sorted(machine().interpreted)))
    return bool(machine().findings)


if __name__ == "__main__":
    sys.exit(main())
