"""Helpers of codec tests: copies to and from any device, encoding and decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from mpi_gpucomp.device import Buffer, dtype_of_name

if TYPE_CHECKING:
    from mpi_gpucomp.codec.base import Codec
    from mpi_gpucomp.device import Memory, Stream


def values(name: str, count: int, seed: int = 0) -> np.ndarray:
    """Return repetitive values of a type, small enough for exact arithmetic."""
    numbers = np.random.default_rng(seed).integers(0, 2 if name == "bool" else 3, count)
    return numbers.astype(np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name))


def upload(data: np.ndarray | bytes, stream: Stream, shift: int = 0) -> Memory:
    """Copy bytes to new memory of the stream's device, at an offset of `shift` bytes."""
    flat = np.frombuffer(data if isinstance(data, bytes) else data.tobytes(), np.uint8)
    memory = stream.device.alloc(flat.nbytes + shift)
    stream.copy(memory.address + shift, flat.ctypes.data, flat.nbytes)
    stream.synchronize()
    return memory


def download(address: int, nbytes: int, stream: Stream) -> bytes:
    """Copy bytes back from the device."""
    flat = np.empty(nbytes, np.uint8)
    stream.copy(flat.ctypes.data, address, nbytes)
    stream.synchronize()
    return flat.tobytes()


def buffer_in(memory: Memory, array: np.ndarray, shift: int = 0, count: int | None = None) -> Buffer:
    """Describe an uploaded array, or its first `count` elements."""
    dtype = dtype_of_name(array.dtype.name)
    assert dtype is not None
    shape = (array.size if count is None else count,)
    return Buffer(memory.address + shift, dtype, shape, device=memory.device.name, owner=memory)


def encode(codec: Codec, array: np.ndarray, stream: Stream, shift: int = 0) -> bytes:
    """Encode an array on the stream's device and return the bytes."""
    with upload(array, stream, shift) as memory:
        source = buffer_in(memory, array, shift)
        with stream.device.alloc(codec.max_encoded(source.count, source.dtype)) as encoded:
            size = codec.encode(source, encoded, stream).result()
            assert size is not None
            return download(encoded.address, size, stream)


def decode(codec: Codec, data: bytes, to: np.ndarray, stream: Stream, op: str = "replace", **place: Any) -> int | None:
    """Decode bytes on the stream's device into an array, or its first `count` elements, at an offset of `shift`."""
    shift = place.get("shift", 0)
    with upload(data, stream) as source, upload(to, stream, shift) as memory:
        try:
            return codec.decode_reduce(source, len(data), buffer_in(memory, to, **place), op, stream).result()
        finally:
            to.view(np.uint8)[:] = np.frombuffer(download(memory.address + shift, to.nbytes, stream), np.uint8)
