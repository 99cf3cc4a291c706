"""The codec split: bit-exact round trips, and a size close to the entropy of the exponents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
from coding import encode
from floats import FLOATS, REDUCTIONS, any_bits, decoded, reduced, round_trip, same_bits, special_values, unsigned
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_gpucomp.codec.split import Split

if TYPE_CHECKING:
    from mpi_gpucomp.device import Stream

SPLIT = Split()
CHUNK = 1 << 20
TILE = 4096
every_type = pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)


def with_exponents(dtype: np.dtype, exponents: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return values with these exponent fields, and random signs and mantissas."""
    info, whole = ml_dtypes.finfo(dtype), unsigned(dtype)
    mask = ((1 << info.nexp) - 1) << info.nmant
    bits = any_bits(dtype, exponents.size, seed).view(whole) & whole.type(~mask & (2 ** (8 * dtype.itemsize) - 1))
    return (bits | exponents.astype(whole) << whole.type(info.nmant)).view(dtype)


def exponents_of(values: np.ndarray) -> np.ndarray:
    info = ml_dtypes.finfo(values.dtype)
    bits = values.view(unsigned(values.dtype)).astype(np.uint64)
    return (bits >> np.uint64(info.nmant)).astype(np.int64) & ((1 << info.nexp) - 1)


def entropy_bits(values: np.ndarray) -> float:
    """Return the entropy of all exponents in bits."""
    counts = np.unique(exponents_of(values), return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def raw_bits(values: np.ndarray) -> int:
    info = ml_dtypes.finfo(values.dtype)
    return values.size * (info.nmant + 1)


def borders(dtype: np.dtype) -> list[int]:
    near_tiles = (tiles * TILE + more for tiles in (1, 2) for more in (-32, -1, 0, 1, 33))
    return [1, 2, 31, 32, 33, 63, 64, 65, 95, 96, 97, 1000, *near_tiles]


@every_type
def test_every_length_round_trips(dtype: np.dtype, stream: Stream) -> None:
    weights = np.random.default_rng(1).normal(0, 0.02, max(borders(dtype))).astype(dtype)
    for length in borders(dtype):
        for values in (weights[:length], any_bits(dtype, length, length)):
            assert same_bits(round_trip(SPLIT, values, stream), values)


@settings(max_examples=100)
@given(data=st.binary(min_size=8, max_size=600), times=st.integers(1, 40), dtype=st.sampled_from(list(FLOATS.values())))
def test_any_bytes_round_trip(data: bytes, times: int, dtype: np.dtype, stream: Stream) -> None:
    values = np.frombuffer(data[: len(data) // 8 * 8] * times, dtype)
    assert same_bits(round_trip(SPLIT, values, stream), values)


@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(0, 9) | st.sampled_from([100, 5000, 20_000]), min_size=1, max_size=32).filter(any),
    low=st.integers(0, 2047),
    seed=st.integers(0, 9),
    dtype=st.sampled_from(list(FLOATS.values())),
)
def test_any_frequencies_round_trip(counts: list[int], low: int, seed: int, dtype: np.dtype, stream: Stream) -> None:
    symbols = 1 << ml_dtypes.finfo(dtype).nexp
    exponents = (np.repeat(np.arange(len(counts)), counts) + low) % symbols
    np.random.default_rng(seed).shuffle(exponents)
    values = with_exponents(dtype, exponents, seed)
    assert same_bits(round_trip(SPLIT, values, stream), values)


def skewed(dtype: np.dtype) -> dict[str, np.ndarray]:
    """Return exponents with extreme frequencies."""
    symbols, count = 1 << ml_dtypes.finfo(dtype).nexp, 40_000
    rare = np.full(count, symbols // 2)
    rare[: symbols - 1] = np.delete(np.arange(symbols), symbols // 2)
    return {
        "one symbol": np.full(count, symbols // 2),
        "only the first": np.zeros(count, int),
        "only the last": np.full(count, symbols - 1),
        "one outlier": np.where(np.arange(count) == 77, 3, 4),
        "uniform": np.arange(count) % symbols,
        "first and last": np.arange(count) % 2 * (symbols - 1),
        "all others once": rare,
        "rare ones last": rare[::-1],
        "geometric": np.minimum(np.random.default_rng(2).geometric(0.5, count), symbols - 1),
    }


@every_type
def test_extreme_frequencies_round_trip(dtype: np.dtype, stream: Stream) -> None:
    for exponents in skewed(dtype).values():
        values = with_exponents(dtype, exponents)
        data = encode(SPLIT, values, stream)
        assert same_bits(decoded(SPLIT, data, values, stream), values)
        assert 8 * len(data) < 1.02 * (raw_bits(values) + entropy_bits(values)) + 8 * 4500


@every_type
def test_special_values_round_trip(dtype: np.dtype, stream: Stream) -> None:
    values = np.resize(special_values(dtype), 3000)
    assert same_bits(round_trip(SPLIT, values, stream), values)


def weights(dtype: np.dtype) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.02, CHUNK // dtype.itemsize).astype(dtype)


def layers(dtype: np.dtype) -> np.ndarray:
    """Return weights like a network's: layers of different sizes and scales, with norms and zeros between."""
    random, scales = np.random.default_rng(3), [0.02, 0.1, 0.005, 0.04, 0.001, 0.3]
    parts = [random.normal(0, scale, 10_000 * (i + 1)) for i, scale in enumerate(scales)]
    parts += [1 + random.normal(0, 0.01, 4000), np.zeros(4000)]
    return np.resize(np.concatenate(parts), CHUNK // dtype.itemsize).astype(dtype)


@every_type
@pytest.mark.parametrize("make", [weights, layers])
def test_the_size_is_close_to_the_entropy(dtype: np.dtype, make: object, stream: Stream) -> None:
    values = make(dtype)  # type: ignore[operator]
    data = encode(SPLIT, values, stream)
    states = 48 * 8 * -(-values.size // TILE)  # of a tile: at most 12 bits for each lane, its size included
    assert 8 * len(data) - raw_bits(values) < 1.005 * entropy_bits(values) + states
    assert same_bits(decoded(SPLIT, data, values, stream), values)


MIN_RATIOS = {"bfloat16": 1.5, "float16": 1.17, "float32": 1.2, "float64": 1.15}


@pytest.mark.parametrize(("name", "least"), MIN_RATIOS.items())
def test_weights_compress(name: str, least: float, stream: Stream) -> None:
    values = weights(FLOATS[name])
    assert values.nbytes / len(encode(SPLIT, values, stream)) > least


@every_type
@pytest.mark.parametrize("op", REDUCTIONS)
def test_decode_and_reduce(dtype: np.dtype, op: str, stream: Stream) -> None:
    random = np.random.default_rng(5)
    target, arriving = (random.normal(0, 1, 33_001).astype(dtype) for _ in range(2))
    result = reduced(SPLIT, encode(SPLIT, arriving, stream), target, op, stream)
    assert same_bits(result, REDUCTIONS[op](target, arriving).astype(dtype))
