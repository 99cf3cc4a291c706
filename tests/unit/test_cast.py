"""The codec cast, compared with the casts of numpy and ml_dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
from coding import encode
from floats import FLOATS, REDUCTIONS, any_bits, encoded_size, reduced, round_trip, same_bits, special_values
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_gpucomp.codec import get_codec

if TYPE_CHECKING:
    from mpi_gpucomp.device import Stream

CASTS = {"cast:bf16": ("float32", "bfloat16"), "cast:f16": ("float32", "float16"), "cast:f32": ("float64", "float32")}
LENGTHS = [1, 2, 31, 32, 33, 1023, 1024, 1025, 5003]
every_cast = pytest.mark.parametrize("spec", CASTS)


def types(spec: str) -> tuple[np.dtype, np.dtype]:
    large, small = CASTS[spec]
    return FLOATS[large], FLOATS[small]


def cast(values: np.ndarray, small: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype(small)


def within_range(values: np.ndarray, small: np.dtype) -> np.ndarray:
    """Drop NaN and values that overflow the small type."""
    return values[~np.isnan(values) & (np.isinf(values) | np.isfinite(cast(values, small).astype(values.dtype)))]


def spread(large: np.dtype, small: np.dtype, count: int) -> np.ndarray:
    """Return values of every magnitude of the small type, down to below its denormals."""
    random, info = np.random.default_rng(1), ml_dtypes.finfo(small)
    exponents = random.uniform(info.minexp - info.nmant - 3, info.maxexp - 0.01, count)
    return (random.choice([-1, 1], count) * 2.0**exponents).astype(large)


def check(spec: str, values: np.ndarray, stream: Stream) -> None:
    large, small = types(spec)
    assert encode(get_codec(spec), values, stream) == cast(values, small).tobytes()
    assert same_bits(round_trip(get_codec(spec), values, stream), cast(values, small).astype(large))


@every_cast
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_and_magnitude(spec: str, length: int, stream: Stream) -> None:
    check(spec, within_range(spread(*types(spec), length), types(spec)[1]), stream)


@every_cast
def test_any_bits_within_range(spec: str, stream: Stream) -> None:
    large, small = types(spec)
    check(spec, within_range(any_bits(large, 20_000), small), stream)
    check(spec, within_range(special_values(large), small), stream)


@every_cast
def test_halfway_goes_to_even(spec: str, stream: Stream) -> None:
    large, small = types(spec)
    places = special_values(small)[:8].astype(large)
    ones = cast(np.arange(1, 3, 2.0 ** -ml_dtypes.finfo(small).nmant), large)[:4000]
    numbers = np.concatenate([places, ones])
    middles = (numbers[:-1] + numbers[1:]) / 2
    check(spec, np.concatenate([middles, np.nextafter(middles, 9), np.nextafter(middles, -9)]).astype(large), stream)


@every_cast
@settings(max_examples=100)
@given(data=st.binary(min_size=8, max_size=300))
def test_any_bytes(spec: str, data: bytes, stream: Stream) -> None:
    large, small = types(spec)
    check(spec, within_range(np.frombuffer(data[: len(data) // 8 * 8], large), small), stream)


@every_cast
def test_nan_keeps_its_sign_and_the_top_of_its_payload(spec: str, stream: Stream) -> None:
    large, small = types(spec)
    values = special_values(large)[14:]
    assert np.isnan(values).all()
    wide, narrow = ml_dtypes.finfo(large).nmant, ml_dtypes.finfo(small).nmant
    bits = values.view(f"u{large.itemsize}").tolist()
    top, payload = ((1 << (8 * small.itemsize - 1)) - 1) >> narrow, (1 << narrow) - 1
    signs = [bit >> (8 * large.itemsize - 1) << (8 * small.itemsize - 1) for bit in bits]
    expected = [
        sign | top << narrow | 1 << (narrow - 1) | bit >> (wide - narrow) & payload
        for sign, bit in zip(signs, bits, strict=True)
    ]
    data = encode(get_codec(spec), values, stream)
    assert np.frombuffer(data, f"u{small.itemsize}").tolist() == expected
    assert np.isnan(round_trip(get_codec(spec), values, stream)).all()


@every_cast
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("place", [0, 1500, 2999])
def test_a_value_that_overflows_is_sent_raw(spec: str, sign: int, place: int, stream: Stream) -> None:
    large, small = types(spec)
    info = ml_dtypes.finfo(small)
    border = float(info.max) + 2.0 ** (info.maxexp - info.nmant - 2)  # rounds to infinity from here on
    values = np.zeros(3000, large)
    values[place] = sign * np.nextafter(large.type(border), large.type(0))
    assert encoded_size(get_codec(spec), values, stream) == 3000 * small.itemsize
    values[place] = sign * border
    assert encoded_size(get_codec(spec), values, stream) is None
    values[place] = sign * np.inf
    assert encoded_size(get_codec(spec), values, stream) == 3000 * small.itemsize


@every_cast
@pytest.mark.parametrize("op", REDUCTIONS)
def test_decode_and_reduce(spec: str, op: str, stream: Stream) -> None:
    large, small = types(spec)
    random = np.random.default_rng(5)
    there, arriving = (random.normal(0, 1, 3001).astype(large) for _ in range(2))
    result = reduced(get_codec(spec), encode(get_codec(spec), arriving, stream), there, op, stream)
    assert same_bits(result, REDUCTIONS[op](there, cast(arriving, small).astype(large)))
