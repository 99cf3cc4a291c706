"""How tests of codecs put arrays on a device, call the codec, and get bytes and arrays back, whatever the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from mpi_gpucomp.device import Buffer, dtype_of_name

if TYPE_CHECKING:
    from mpi_gpucomp.codec.base import Codec
    from mpi_gpucomp.device import Memory, Stream


def values(name: str, count: int, seed: int = 0) -> np.ndarray:
    """Make numbers of the named type that repeat, and are small enough for every operation to stay exact."""
    numbers = np.random.default_rng(seed).integers(0, 2 if name == "bool" else 3, count)
    return numbers.astype(np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name))


def upload(data: np.ndarray | bytes, stream: Stream, shift: int = 0) -> Memory:
    """Take memory of the stream's device and put the bytes there, `shift` bytes behind its start."""
    flat = np.frombuffer(data if isinstance(data, bytes) else data.tobytes(), np.uint8)
    memory = stream.device.alloc(flat.nbytes + shift)
    stream.copy(memory.address + shift, flat.ctypes.data, flat.nbytes)
    stream.synchronize()
    return memory


def download(address: int, nbytes: int, stream: Stream) -> bytes:
    """Get bytes back from the device."""
    flat = np.empty(nbytes, np.uint8)
    stream.copy(flat.ctypes.data, address, nbytes)
    stream.synchronize()
    return flat.tobytes()


def buffer_in(memory: Memory, array: np.ndarray, shift: int = 0, count: int | None = None) -> Buffer:
    """Describe the array that was put into memory, or its first `count` elements."""
    dtype = dtype_of_name(array.dtype.name)
    assert dtype is not None
    shape = (array.size if count is None else count,)
    return Buffer(memory.address + shift, dtype, shape, device=memory.device.name, owner=memory)


def encode(codec: Codec, array: np.ndarray, stream: Stream, shift: int = 0) -> bytes:
    """Encode an array on the stream's device and get the bytes."""
    with upload(array, stream, shift) as memory:
        source = buffer_in(memory, array, shift)
        with stream.device.alloc(codec.max_encoded(source.count, source.dtype)) as room:
            size = codec.encode(source, room, stream).result()
            assert size is not None
            return download(room.address, size, stream)


def decode(codec: Codec, data: bytes, to: np.ndarray, stream: Stream, op: str = "replace", **place: Any) -> int | None:
    """Decode bytes on the stream's device onto an array (`count`: onto so many of its elements; `shift`: unaligned)."""
    shift = place.get("shift", 0)
    with upload(data, stream) as source, upload(to, stream, shift) as memory:
        try:
            return codec.decode_reduce(source, len(data), buffer_in(memory, to, **place), op, stream).result()
        finally:
            to.view(np.uint8)[:] = np.frombuffer(download(memory.address + shift, to.nbytes, stream), np.uint8)
