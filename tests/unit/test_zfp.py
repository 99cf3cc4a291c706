"""The codec zfp, compared with libzfp: the same bytes and the same decoded values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
from coding import encode
from floats import FLOATS, REDUCTIONS, any_bits, decoded, encoded_size, reduced, round_trip, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.codec.zfp import Zfp
from mpi_gpucomp.device import dtype_of_name

if TYPE_CHECKING:
    from mpi_gpucomp.device import Stream

zfpy = pytest.importorskip("zfpy")

F32, F64 = FLOATS["float32"], FLOATS["float64"]
LOWEST_RATE = {F32: 2.25, F64: 3.0}
SMALLEST_FIELD = {F32: 29, F64: 61}
"""Biased exponent of the largest value of a block, below which the block becomes zeros."""
LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 127, 128, 129, 1000, 5003]
FRACTIONS = [0.5, 2.25, 2.3, 2.375, 2.5, 3.125, 3.2, 5.75, 7.1, 15.9, 16.25, 16.3, 17.7, 24.5, 31.75]
RATES = [(F32, rate) for rate in [*range(1, 33), *FRACTIONS]]
RATES += [(F64, rate) for rate in [*range(1, 65), *FRACTIONS, 33.3, 47.75, 63.5]]
every_rate = pytest.mark.parametrize(("dtype", "rate"), RATES, ids=str)


def zfpy_bytes(array: np.ndarray, rate: float) -> bytes:
    """Encode with libzfp, whose Python package overruns its memory below the lowest rate."""
    encoded: bytes = zfpy.compress_numpy(array, rate=max(rate, LOWEST_RATE[array.dtype]), write_header=False)
    return encoded


def zfpy_values(data: bytes, dtype: np.dtype, count: int, rate: float) -> np.ndarray:
    lowest = max(rate, LOWEST_RATE[dtype])
    values: np.ndarray = zfpy._decompress(data, zfpy.dtype_to_ztype(dtype), (count,), rate=lowest)
    return values


def biased_exponents(array: np.ndarray) -> np.ndarray:
    bits = array.view(np.uint32 if array.dtype == F32 else np.uint64)
    return (bits >> np.finfo(array.dtype).nmant).astype(np.int64) & (0xFF if array.dtype == F32 else 0x7FF)


def without_tiny_blocks(array: np.ndarray) -> np.ndarray:
    """Zero the blocks for which libzfp's scale overflows."""
    padded = np.pad(array, (0, -array.size % 4)).reshape(-1, 4)
    tiny = biased_exponents(padded).max(1) < SMALLEST_FIELD[array.dtype]
    return np.where(tiny[:, None], array.dtype.type(0), padded).ravel()[: array.size]


def samples(dtype: np.dtype) -> dict[str, np.ndarray]:
    """Return arrays that are easy and hard for ZFP."""
    random, info = np.random.default_rng(1), np.finfo(dtype)
    denormals = np.full(400, 3 * info.smallest_subnormal, dtype)
    denormals[::4] = random.normal(0, 1e-12, 100)
    range_of_exponents = random.uniform(-28, info.maxexp * 0.3, 1000)
    kinds = {
        "normal": random.normal(0, 0.02, 1000),
        "smooth": np.sin(np.arange(1000) / 40),
        "zeros": np.zeros(130),
        "negative zeros": np.full(130, -0.0),
        "one value in zeros": np.where(np.arange(300) == 150, 1.5, 0),
        "constant": np.full(300, -3.7),
        "denormals beside larger ones": denormals,
        "huge ranges": random.choice([-1, 1], 1000) * 10.0**range_of_exponents,
        "largest": info.max * random.choice([-1, 1, 0.5], 200),
        "whole numbers": random.integers(-1000, 1000, 1000),
        "powers of two": 2.0 ** random.integers(-90, 90, 1000),
    }
    return {kind: values.astype(dtype) for kind, values in kinds.items()}


def check_like_zfpy(array: np.ndarray, rate: float, stream: Stream) -> None:
    codec = Zfp(rate)
    data = encode(codec, array, stream)
    assert data == zfpy_bytes(without_tiny_blocks(array), rate)
    assert same_bits(decoded(codec, data, array, stream), zfpy_values(data, array.dtype, array.size, rate))


@every_rate
def test_every_rate_matches_libzfp(dtype: np.dtype, rate: float, stream: Stream) -> None:
    for values in samples(dtype).values():
        check_like_zfpy(values, rate, stream)


@every_rate
def test_every_length_matches_libzfp(dtype: np.dtype, rate: float, stream: Stream) -> None:
    values = np.random.default_rng(2).normal(0, 1, max(LENGTHS)).astype(dtype)
    for length in LENGTHS:
        check_like_zfpy(values[:length], rate, stream)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_a_large_chunk_matches_libzfp(dtype: np.dtype, stream: Stream) -> None:
    check_like_zfpy(np.random.default_rng(3).normal(0, 0.02, 300_001).astype(dtype), 8, stream)


@every_rate
def test_any_bytes_decode_like_libzfp(dtype: np.dtype, rate: float, stream: Stream) -> None:
    codec, count, known = Zfp(rate), 515, dtype_of_name(dtype.name)
    assert known is not None
    data = np.random.default_rng(4).bytes(codec.encoded_size(count, known))
    back = decoded(codec, data, np.empty(count, dtype), stream)
    libzfp = zfpy_values(data, dtype, count, rate)
    assert same_bits(back, libzfp)


def finite(width: int) -> st.SearchStrategy[np.ndarray]:
    numbers = st.floats(width=width, allow_nan=False, allow_infinity=False)
    return arrays(np.dtype(f"f{width // 8}"), st.integers(1, 40), elements=numbers)


@settings(max_examples=150)
@given(values=st.one_of(finite(32), finite(64)), rate=st.floats(0.25, 64))
def test_any_finite_values_match_libzfp(values: np.ndarray, rate: float, stream: Stream) -> None:
    check_like_zfpy(values, min(rate, 8 * values.itemsize), stream)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_tiny_blocks_become_zeros(dtype: np.dtype, stream: Stream) -> None:
    border = dtype.type(2.0) ** (SMALLEST_FIELD[dtype] - (127 if dtype == F32 else 1023))
    below = np.nextafter(border, dtype.type(0))
    values = np.array([border, 0, 0, 0, below, -below, below, below, *[np.finfo(dtype).smallest_subnormal] * 4], dtype)
    back = round_trip(Zfp(8 * dtype.itemsize), values, stream)
    assert back.tolist() == [border, *[0.0] * 11]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 130, 399])
def test_a_chunk_with_nan_or_infinity_is_sent_raw(name: str, value: float, place: int, stream: Stream) -> None:
    values = np.ones(400, FLOATS[name])
    assert encoded_size(Zfp(8), values, stream) == 400
    values[place] = value
    assert encoded_size(Zfp(8), values, stream) is None


def round_trip_as_float32(values: np.ndarray, rate: float, stream: Stream) -> np.ndarray:
    """Round trip as float32, and clamp to the range of the 16-bit type."""
    most = float(ml_dtypes.finfo(values.dtype).max)
    return np.clip(round_trip(Zfp(rate), values.astype(np.float32), stream), -most, most)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("rate", [1, 3, 4.5, 8, 12, 16, 16.25, 20, 32])
def test_16_bit_floats_are_coded_as_float32(name: str, rate: float, stream: Stream) -> None:
    values = any_bits(FLOATS[name], 3001)
    values = np.where(np.isfinite(values.astype(np.float32)), values, FLOATS[name].type(1))
    assert encode(Zfp(rate), values, stream) == encode(Zfp(rate), values.astype(np.float32), stream)
    expected = round_trip_as_float32(values, rate, stream).astype(values.dtype)
    assert same_bits(round_trip(Zfp(rate), values, stream), expected)
    assert np.isfinite(expected.astype(np.float32)).all()


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("rate", [6, 20])
def test_decode_and_reduce_rounds_once(name: str, op: str, rate: float, stream: Stream) -> None:
    random, dtype = np.random.default_rng(5), FLOATS[name]
    target, arriving = (random.normal(0, 1, 1001).astype(dtype) for _ in range(2))
    data = encode(Zfp(rate), arriving, stream)
    if dtype.itemsize == 2:
        back = round_trip_as_float32(arriving, rate, stream)
        expected = REDUCTIONS[op](target.astype(np.float32), back).astype(dtype)
    else:
        expected = REDUCTIONS[op](target, decoded(Zfp(rate), data, arriving, stream))
    assert same_bits(reduced(Zfp(rate), data, target, op, stream), expected)


@pytest.mark.parametrize(("name", "most"), [("float16", 32), ("bfloat16", 32), ("float32", 32), ("float64", 64)])
def test_a_rate_is_clamped_to_the_size_of_the_type(name: str, most: int, stream: Stream) -> None:
    values = np.random.default_rng(6).normal(0, 1, 333).astype(FLOATS[name])
    assert encode(get_codec("zfp:rate=64"), values, stream) == encode(Zfp(most), values, stream)


@pytest.mark.parametrize(("name", "bits"), [("float16", 9), ("bfloat16", 9), ("float32", 9), ("float64", 12)])
@pytest.mark.parametrize("rate", [0.001, 1, 2])
def test_a_low_rate_is_clamped_to_the_exponent(name: str, bits: int, rate: float) -> None:
    dtype = dtype_of_name(name)
    assert dtype is not None
    assert Zfp(rate).block_bits(dtype) == bits
    assert Zfp(rate).encoded_size(4 * 64, dtype) == 8 * bits
