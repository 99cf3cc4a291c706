"""The codec mpc: bit-exact round trips for every stride and length, and compression of smooth data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from coding import encode
from floats import FLOATS, REDUCTIONS, any_bits, reduced, round_trip, same_bits, special_values
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_gpucomp.codec.mpc import Mpc

if TYPE_CHECKING:
    from mpi_gpucomp.device import Stream

TYPES = [FLOATS["float32"], FLOATS["float64"]]
LENGTHS = [1, 2, 31, 32, 33, 63, 64, 65, 1000, 1023, 1024, 1025, 2048, 2049, 5003]
both_types = pytest.mark.parametrize("dtype", TYPES, ids=str)


def walk(dtype: np.dtype, count: int, stride: int) -> np.ndarray:
    """Return `stride` interleaved smooth series in separate ranges."""
    steps = np.arange(count) // stride / 300
    series = np.arange(count) % stride
    return ((series + 1) * 100 + np.sin(steps + series)).astype(dtype)


@both_types
@pytest.mark.parametrize("stride", range(1, 33))
def test_every_stride_round_trips(dtype: np.dtype, stride: int, stream: Stream) -> None:
    for values in (any_bits(dtype, 2500, stride), walk(dtype, 2500, stride), special_values(dtype)):
        assert same_bits(round_trip(Mpc(stride), values, stream), values)


@both_types
@pytest.mark.parametrize("stride", [1, 3, 31, 32])
def test_every_length(dtype: np.dtype, stride: int, stream: Stream) -> None:
    for length in LENGTHS:
        for values in (any_bits(dtype, length), walk(dtype, length, stride)):
            assert same_bits(round_trip(Mpc(stride), values, stream), values)


@both_types
def test_a_large_chunk(dtype: np.dtype, stream: Stream) -> None:
    values = np.concatenate([walk(dtype, 200_000, 1), any_bits(dtype, 50_001), np.zeros(50_000, dtype)])
    assert same_bits(round_trip(Mpc(), values, stream), values)


@settings(max_examples=100)
@given(
    data=st.binary(min_size=8, max_size=600),
    times=st.integers(1, 9),
    dtype=st.sampled_from(TYPES),
    stride=st.integers(1, 32),
)
def test_any_bytes_round_trip(data: bytes, times: int, dtype: np.dtype, stride: int, stream: Stream) -> None:
    values = np.frombuffer(data[: len(data) // 8 * 8] * times, dtype)
    assert same_bits(round_trip(Mpc(stride), values, stream), values)


@both_types
def test_single_bits_round_trip(dtype: np.dtype, stream: Stream) -> None:
    bits = np.zeros((8 * dtype.itemsize, 33), f"u{dtype.itemsize}")
    for place in range(8 * dtype.itemsize):
        bits[place, place % 33] = 1 << place
    values = bits.ravel().view(dtype)
    assert same_bits(round_trip(Mpc(), values, stream), values)


@both_types
@pytest.mark.parametrize("stride", [1, 4, 7])
def test_smooth_data_compresses(dtype: np.dtype, stride: int, stream: Stream) -> None:
    values = walk(dtype, 100_000, stride)
    ratio = values.nbytes / len(encode(Mpc(stride), values, stream))
    assert ratio > (1.9 if dtype.itemsize == 4 else 1.15)


def test_the_right_stride_compresses_better(stream: Stream) -> None:
    values = walk(TYPES[0], 100_000, 3)
    assert len(encode(Mpc(3), values, stream)) < 0.8 * len(encode(Mpc(1), values, stream))


@both_types
def test_constant_data_compresses_well(dtype: np.dtype, stream: Stream) -> None:
    values = np.full(100_000, 3.7, dtype)
    assert values.nbytes / len(encode(Mpc(), values, stream)) > 20


@both_types
@pytest.mark.parametrize("op", REDUCTIONS)
def test_decode_and_reduce(dtype: np.dtype, op: str, stream: Stream) -> None:
    random = np.random.default_rng(5)
    target, arriving = (random.normal(0, 1, 3001).astype(dtype) for _ in range(2))
    result = reduced(Mpc(2), encode(Mpc(2), arriving, stream), target, op, stream)
    assert same_bits(result, REDUCTIONS[op](target, arriving))
