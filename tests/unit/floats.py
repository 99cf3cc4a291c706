"""Helpers of float codec tests: types, arrays of all bit patterns, round trips, reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
from coding import buffer_in, decode, encode, upload

if TYPE_CHECKING:
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.device import Stream

FLOATS = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
REDUCTIONS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def unsigned(dtype: np.dtype) -> np.dtype:
    """Return the unsigned integer type with the size of a float."""
    return np.dtype(f"u{dtype.itemsize}")


def any_bits(dtype: np.dtype, count: int, seed: int = 0) -> np.ndarray:
    """Return values with random bits, including NaNs with payloads, infinities and denormals."""
    return np.frombuffer(np.random.default_rng(seed).bytes(count * dtype.itemsize), dtype)


def special_values(dtype: np.dtype) -> np.ndarray:
    """Return zeros, infinities, NaNs, extreme denormals and extreme values of both signs."""
    info = ml_dtypes.finfo(dtype)
    quiet = 1 << (info.nmant - 1)
    infinity = ((1 << info.nexp) - 1) << info.nmant
    magnitudes = [0, 1, 2, (1 << info.nmant) - 1, 1 << info.nmant, infinity - 1, infinity, infinity + 1]
    magnitudes += [infinity + quiet, infinity + quiet + 5, infinity + (1 << info.nmant) - 1]
    sign = 1 << (8 * dtype.itemsize - 1)
    return np.array([m | s for m in magnitudes for s in (0, sign)], unsigned(dtype)).view(dtype)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Return True if two arrays are equal bit for bit."""
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def decoded(codec: Codec, data: bytes, like: np.ndarray, stream: Stream) -> np.ndarray:
    """Decode bytes to an array like another."""
    back = np.full(like.size, 7, like.dtype)
    assert decode(codec, data, back, stream) == len(data)
    return back


def round_trip(codec: Codec, array: np.ndarray, stream: Stream) -> np.ndarray:
    """Encode and decode an array."""
    return decoded(codec, encode(codec, array, stream), array, stream)


def encoded_size(codec: Codec, array: np.ndarray, stream: Stream) -> int | None:
    """Encode an array and return the size, or None if it must be sent raw."""
    with upload(array, stream) as memory:
        source = buffer_in(memory, array)
        with stream.device.alloc(codec.max_encoded(source.count, source.dtype)) as encoded:
            return codec.encode(source, encoded, stream).result()


def reduced(codec: Codec, data: bytes, target: np.ndarray, op: str, stream: Stream) -> np.ndarray:
    """Decode bytes and reduce them into a copy of an array."""
    result = target.copy()
    assert decode(codec, data, result, stream, op) == len(data)
    return result
