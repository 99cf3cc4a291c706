"""How fast this rank encodes and decodes, measured on values that codecs shrink, though none that make it easy."""

from __future__ import annotations

from functools import lru_cache
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.codec import frame
from mpi_gpucomp.codec.auto import CODINGS, Auto, Costs
from mpi_gpucomp.device import Buffer, dtype_of_name, get_device
from mpi_gpucomp.errors import DeviceError

if TYPE_CHECKING:
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.device import DType, Memory, Stream

    Array = np.ndarray[Any, Any]

__all__ = ["codec_speeds"]

ROUNDS = 4
CODED_BYTES = 1 << 19


@lru_cache(maxsize=16)
def codec_speeds(device: str) -> tuple[float, ...]:
    """Return the seconds per byte of encoding and decoding for each of CODINGS, then the seconds of a sample."""
    place = get_device(device)
    stream = place.stream()
    times: list[float] = []
    with place.alloc(CODED_BYTES) as plain:
        for codec, name in CODINGS:
            source = _fill(plain, codec, name, stream)
            try:
                times += (seconds / CODED_BYTES for seconds in _coded(codec, source, stream))
            except DeviceError:
                times += (inf, inf)
        times.append(_sampled(plain, stream))
    stream.close()
    return tuple(times)


def _fill(plain: Memory, codec: Codec, name: str, stream: Stream) -> Buffer:
    """Fill memory with values that the codec shrinks, though none that make it easy."""
    dtype = dtype_of_name(name)
    assert dtype is not None
    count = CODED_BYTES // dtype.itemsize
    values = _values(codec, dtype, count)
    stream.copy(plain.address, values.ctypes.data, CODED_BYTES)
    stream.synchronize()
    return Buffer(plain.address, dtype, (count,), device=plain.device.name, owner=plain)


def _values(codec: Codec, dtype: DType, count: int) -> Array:
    random = np.random.default_rng(0)
    if dtype.kind != "f":
        return random.integers(0, 1000, count // 4, np.int32)  # for lz4 and zstd far slower than text
    if codec.name == "mpc":
        return np.cumsum(random.normal(0, 1, count)).astype(dtype.name)
    drawn = random.normal(0, 0.02, count)
    if dtype.name == "bfloat16":  # which numpy does not have: the upper half of a float32
        return (drawn.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return drawn.astype(dtype.name)


def _coded(codec: Codec, source: Buffer, stream: Stream) -> tuple[float, float]:
    """Return the seconds to make a frame, and to check and decode it."""
    encoding, decoding = inf, inf
    with (
        stream.device.alloc(frame.room(codec, source.count, source.dtype)) as room,
        stream.device.alloc(source.nbytes) as back,
    ):
        to = Buffer(back.address, source.dtype, source.shape, device=source.device, owner=back)
        for _ in range(ROUNDS):
            start = perf_counter()
            frame.encode(codec, source, room, 0, stream).size()
            middle = perf_counter()
            header = frame.read_header(room, stream)
            frame.decode(codec, header, room, to, stream, op="replace").size()
            encoding, decoding = min(encoding, middle - start), min(decoding, perf_counter() - middle)
    return encoding, decoding


def _sampled(plain: Memory, stream: Stream) -> float:
    """Return the seconds to try one codec on a sample, as the sender of a chunk does."""
    auto = Auto(Costs(wire=1.0, sample=0.0))  # so slow a link that everything is tried
    dtype = dtype_of_name("float32")
    assert dtype is not None
    source = Buffer(plain.address, dtype, (CODED_BYTES // 4,), device=plain.device.name, owner=plain)
    best = inf
    for _ in range(ROUNDS):
        start = perf_counter()
        auto.sample(source, stream).result()
        best = min(best, perf_counter() - start)
    return best / 2
