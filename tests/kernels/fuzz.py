"""Fuzzes every codec and kernel in guarded memory; run in its own process.

    MPI_GPUCOMP_HOST_LIBRARY=<level or path> python tests/kernels/fuzz.py heap|pages <rounds> <seed> [<codec> ...]

A round runs every codec (or only the named ones) with every type and a few counts. An invalid access ends the process;
the last line printed names the case.
"""

from __future__ import annotations

import ctypes
import faulthandler
import sys
import zlib
from contextlib import suppress
from itertools import product
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from damage import damaged
from guarded import CutStream, GuardedDevice, Heap, Pages

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.codec.base import OPS
from mpi_gpucomp.codec.delta import Delta
from mpi_gpucomp.codec.kernel_codec import TiledCodec
from mpi_gpucomp.device.base import DTYPES, DType
from mpi_gpucomp.device.buffer import Buffer
from mpi_gpucomp.errors import DecodeError

if TYPE_CHECKING:
    from mpi_gpucomp.codec.base import Codec
    from mpi_gpucomp.device.base import Memory, Stream

SPECS = [
    *("zfp:rate=1", "zfp:rate=7.3", "zfp:rate=16", "zfp:rate=17.75", "zfp:rate=64"),
    *("mpc", "mpc:stride=3", "mpc:stride=32", "bound:abs=1e-3", "bound:rel=1e-4", "bound:rel=0.5"),
    *("split", "cast:bf16", "cast:f16", "cast:f32", "none"),
]
COUNTS = [1, 3, 5, 31, 32, 33, 127, 129, 1023, 1024, 1025, 3000]
SPLIT_COUNTS = [16383, 16385, 32769, 70000]  # around multiples of its larger tiles
REDUCE_OPS = 11


def say(*words: object) -> None:
    print(*words, flush=True)


def numbers(dtype: DType, count: int, random: np.random.Generator) -> bytes:
    """Return elements of a random kind: any bits, weights, smooth, constant, few distinct values, integers."""
    small = {"float16": np.float16, "float64": np.float64}.get(dtype.name, np.float32)
    kinds: list[np.ndarray] = [
        random.normal(0, 0.02, count),
        np.sin(np.arange(count) / 50) * 10.0 ** random.integers(-4, 5),
        np.full(count, random.normal()),
        random.choice([0.0, -0.0, 1.0, 1e-40, np.inf, np.nan], count),
        random.integers(-9, 9, count) * 2.0 ** random.integers(-30, 12),
    ]
    kind = int(random.integers(len(kinds) + 1))
    if kind == len(kinds) or dtype.kind != "f":
        return random.bytes(count * dtype.itemsize)
    values = np.ascontiguousarray(kinds[kind].astype(small))
    if dtype.name == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.tobytes()


def put(data: bytes, stream: Stream) -> Memory:
    """Copy bytes to memory of exactly their size."""
    memory = stream.device.alloc(len(data))
    ctypes.memmove(memory.address, data, len(data))
    return memory


def get(memory: Memory, nbytes: int | None = None) -> bytes:
    return ctypes.string_at(memory.address, memory.nbytes if nbytes is None else nbytes)


def encode(codec: Codec, data: bytes, count: int, dtype: DType, stream: Stream) -> bytes | None:
    """Encode with a capacity of exactly `max_encoded`."""
    with put(data, stream) as memory, stream.device.alloc(codec.max_encoded(count, dtype)) as room:
        size = codec.encode(Buffer(memory.address, dtype, (count,), readonly=True), room, stream).result()
        return None if size is None else get(room, size)


def decode(codec: Codec, stream_bytes: bytes, onto: bytes, dtype: DType, op: str, stream: Stream) -> bytes | None:
    """Decode into elements; None if the decoder raises."""
    with put(stream_bytes, stream) as source, put(onto, stream) as memory:
        to = Buffer(memory.address, dtype, (len(onto) // dtype.itemsize,))
        try:
            codec.decode_reduce(source, len(stream_bytes), to, op, stream).result()
        except DecodeError:
            return None
        return get(memory)


def try_codec(codec: Codec, dtype: DType, count: int, stream: Stream, random: np.random.Generator) -> None:
    """Encode, decode, then decode damaged bytes."""
    data = numbers(dtype, count, random)
    say(codec.spec, dtype, count, "encode")
    encoded = encode(codec, data, count, dtype, stream)
    if encoded is None:  # to be sent raw
        return
    back = decode(codec, encoded, bytes(len(data)), dtype, "replace", stream)
    assert back == data if codec.lossless else back is not None, "the round trip is not exact"
    op = str(random.choice(list(OPS) if dtype.kind == "f" else ["replace", "prod"]))  # defined for every type
    assert decode(codec, encoded, data, dtype, op, stream) is not None
    for _ in range(6):
        how, broken = damaged(codec, encoded, count, dtype, random)
        say(codec.spec, dtype, count, op, how, len(broken))
        result = decode(codec, broken, data, dtype, op, stream)
        assert len(broken) == len(encoded) or result is None or how in ("resized", "swapped"), "a wrong length passed"


def try_codecs(stream: Stream, random: np.random.Generator, specs: list[str] = SPECS) -> None:
    """Run every codec with every supported type at a few counts."""
    for spec, dtype in product(specs, DTYPES):
        codec = get_codec(spec)
        if dtype.name in codec.dtypes:
            counts = [int(count) for count in random.choice(COUNTS, 2, replace=False)]
            if spec == "split":
                counts.append(int(random.choice(SPLIT_COUNTS)))
            for count in counts:
                try_codec(codec, dtype, count, stream, random)


def try_threads(device: GuardedDevice, random: np.random.Generator) -> None:
    """Encode and decode arrays that are large enough for several threads."""
    stream = device.stream()
    for spec, dtype in product(("mpc", "bound:rel=0.001", "split"), DTYPES):
        codec = get_codec(spec)
        if dtype.name in codec.dtypes and isinstance(codec, TiledCodec):
            tiling = codec.tiling(dtype)
            count = 2 * tiling.grain * tiling.values + 1
            data = random.bytes(count * dtype.itemsize)
            say(spec, dtype, count, "threads")
            encoded = encode(codec, data, count, dtype, stream)
            assert encoded is not None
            assert encoded == encode(codec, data, count, dtype, device.stream(inline=True)), "threads change the bytes"
            back = decode(codec, encoded, bytes(len(data)), dtype, "replace", stream)
            assert back == data if codec.lossless else back is not None
    stream.close()


def try_delta(stream: Stream, random: np.random.Generator) -> None:
    """Encode the difference of any two versions, decode it, then decode damaged bytes."""
    for dtype in (dtype for dtype in DTYPES if dtype.name in Delta.dtypes):
        count = int(random.choice(COUNTS))
        say("delta", dtype, count)
        data = numbers(dtype, count, random)
        with put(data, stream) as memory, put(numbers(dtype, count, random), stream) as base:
            buffer = Buffer(memory.address, dtype, (count,))
            codec = Delta(buffer, base)
            with stream.device.alloc(codec.max_encoded(count, dtype)) as room:
                encoded = get(room, codec.encode(buffer, room, stream).result())
            for how, some in [("whole", encoded), *(damaged(codec, encoded, count, dtype, random) for _ in range(6))]:
                say("delta", dtype, count, how, len(some))
                ctypes.memset(memory.address, 0, memory.nbytes)
                with put(some, stream) as source, suppress(DecodeError):
                    codec.decode(source, len(some), buffer, stream).result()
                assert how != "whole" or get(memory) == data, "the round trip is not exact"


def try_reduce(stream: Stream, random: np.random.Generator) -> None:
    """Reduce any bits with every operation, including those that are not defined for a type."""
    for dtype, op in product(DTYPES, range(REDUCE_OPS + 1)):
        count = int(random.choice(COUNTS))
        say("reduce", dtype, count, op)
        nbytes = count * dtype.itemsize
        with put(random.bytes(nbytes), stream) as to, put(random.bytes(nbytes), stream) as source:
            stream.launch(f"reduce_{dtype.suffix}", -(-count // 1024), to.address, source.address, count, op)


def try_checksum(stream: Stream, random: np.random.Generator) -> None:
    """Checksum bytes at any address."""
    for nbytes in [0, 1, 31, 511, 512, 513, 4095, 4096, 4097, 20001]:
        say("checksum", nbytes)
        data, tiles, shift = random.bytes(nbytes), -(-nbytes // 4096), int(random.integers(8))
        with (
            put(bytes(shift) + data, stream) as there,
            stream.device.alloc(8 * tiles) as sums,
            put(bytes(4), stream) as result,
        ):
            stream.launch("checksum_tiles", tiles, there.address + shift, nbytes, sums.address)
            stream.launch("checksum_join", 1, sums.address, nbytes, result.address)
            assert int.from_bytes(get(result), "little") == zlib.adler32(data)


def try_pack(stream: Stream, random: np.random.Generator) -> None:
    """Gather and scatter strided elements of every size, at addresses and strides of any kind."""
    for _, itemsize in product(range(6), (1, 2, 4, 8, 16)):
        whole = np.frombuffer(random.bytes(itemsize * 7 * 61 * 9), f"V{itemsize}").reshape(7, 61, 9)
        picked = tuple(slice(*random.integers(0, 3, 1), None, int(random.choice([-2, -1, 1, 2]))) for _ in range(3))
        view = whole[picked].transpose(random.permutation(3))
        say("pack", itemsize, view.shape, view.strides)
        layout = np.array([view.shape, view.strides], np.int64).tobytes()
        offset = view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        with (
            put(whole.tobytes(), stream) as there,
            put(view.tobytes(), stream) as flat,
            put(layout, stream) as described,
        ):
            where = (there.address + offset, flat.address, view.size, 3, described.address, described.address + 24)
            stream.launch(f"pack_gather_{itemsize}", -(-view.size // 1024), *where)
            assert get(flat) == view.tobytes()
            stream.launch(f"pack_scatter_{itemsize}", -(-view.size // 1024), *where)
            assert get(there) == whole.tobytes()


def try_bucket(stream: Stream, random: np.random.Generator) -> None:
    """Pack ranges of any length at any address into a bucket, and unpack them."""
    spans = [random.bytes(int(n)) for n in random.integers(0, 70, 40)]
    say("bucket", [len(span) for span in spans])
    memories = [put(span, stream) for span in spans]
    offsets = np.cumsum([0, *(len(span) for span in spans)])
    pieces = np.array([(m.address, o, m.nbytes) for m, o in zip(memories, offsets[:-1], strict=True)], np.uint64)
    with put(pieces.tobytes(), stream) as table, put(bytes(int(offsets[-1])), stream) as bucket:
        for direction in (0, 1):
            stream.launch("pack_bucket", len(spans), table.address, len(spans), bucket.address, direction)
        assert get(bucket) == b"".join(spans)
    for memory in memories:
        memory.release()


def main(memory: str, rounds: int, seed: int, specs: list[str]) -> None:
    faulthandler.enable()
    device = GuardedDevice({"heap": Heap, "pages": Pages}[memory]())
    for number in range(rounds):
        say("round", number, "seed", seed + number)
        random = np.random.default_rng(seed + number)
        stream = CutStream(device, Random(seed + number))
        try_codecs(stream, random, specs or SPECS)
        for attempt in () if specs else (try_delta, try_reduce, try_checksum, try_pack, try_bucket):
            attempt(stream, random)
    if not specs:
        try_threads(device, np.random.default_rng(seed))
    say("done")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
