"""The codec bound: the bound holds for every element, and values that would violate it are exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
from coding import encode
from floats import FLOATS, REDUCTIONS, any_bits, decoded, reduced, round_trip, same_bits, special_values, unsigned
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpi_gpucomp.codec.bound import Bound

if TYPE_CHECKING:
    from mpi_gpucomp.device import Stream

LENGTHS = [1, 2, 31, 32, 33, 1000, 1023, 1024, 1025, 2049, 5003]
ABSOLUTE = [1e-300, 1e-45, 1e-40, 3e-8, 1e-3, 0.1, 1.0, 12345.678, 1e38, 1e300]
RELATIVE = [1e-300, 1e-7, 1e-4, 0.01, 0.3, 0.999]
every_type = pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)


def samples(dtype: np.dtype) -> dict[str, np.ndarray]:
    """Return arrays that are easy and hard to quantise."""
    random = np.random.default_rng(1)
    kinds = {
        "normal": random.normal(0, 0.02, 3000),
        "smooth": np.sin(np.arange(3000) / 100),
        "far from zero": random.normal(1000, 1, 3000),
        "every magnitude": random.choice([-1, 1], 3000) * 2.0 ** random.uniform(-14, 15, 3000),
        "constant": np.full(3000, 0.7),
        "zeros": np.zeros(3000),
        "negative zeros": np.full(100, -0.0),
        "one value": np.array([1e-3]),
        "steps": np.repeat(np.arange(100), 30),
    }
    cast = {kind: values.astype(dtype) for kind, values in kinds.items()}
    bits, top = unsigned(dtype), special_values(dtype)[10:12]
    denormals = random.integers(0, 200, 1000).astype(bits).view(dtype)
    return cast | {"denormals": denormals, "any bits": any_bits(dtype, 5000), "largest": np.repeat(top, 40)}


def exact(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return values.astype(np.float64)


def range_of(values: np.ndarray) -> float:
    finite = exact(values)[np.isfinite(exact(values))]
    with np.errstate(over="ignore"):
        return float(finite.max() - finite.min()) if finite.size else 0.0


def check_bound(values: np.ndarray, back: np.ndarray, bound: float) -> None:
    """Check the bound, exactly and in the caller's precision; values that are not finite must be unchanged."""
    finite = np.isfinite(exact(values))
    assert same_bits(values[~finite], back[~finite])
    values, back = values[finite], back[finite]
    with np.errstate(over="ignore"):
        assert (np.abs(exact(values) - exact(back)) <= bound).all()
        assert (exact(np.abs(values - back)) <= bound).all()


@every_type
@pytest.mark.parametrize("bound", ABSOLUTE)
def test_an_absolute_bound_holds(dtype: np.dtype, bound: float, stream: Stream) -> None:
    for values in samples(dtype).values():
        check_bound(values, round_trip(Bound(abs=bound), values, stream), bound)


@every_type
@pytest.mark.parametrize("rel", RELATIVE)
def test_a_relative_bound_holds(dtype: np.dtype, rel: float, stream: Stream) -> None:
    for values in samples(dtype).values():
        check_bound(values, round_trip(Bound(rel=rel), values, stream), rel * range_of(values))


@every_type
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length(dtype: np.dtype, length: int, stream: Stream) -> None:
    values = np.random.default_rng(length).normal(0, 1, length).astype(dtype)
    check_bound(values, round_trip(Bound(abs=0.01), values, stream), 0.01)
    check_bound(values, round_trip(Bound(rel=0.01), values, stream), 0.01 * range_of(values))


def all_bits_of(dtype: np.dtype) -> st.SearchStrategy[np.ndarray]:
    return st.binary(min_size=8, max_size=320).map(lambda data: np.frombuffer(data[: len(data) // 8 * 8], dtype))


def near_a_step(dtype: np.dtype) -> st.SearchStrategy[np.ndarray]:
    """Return multiples of half a step, where rounding decides."""
    return st.lists(st.integers(-(1 << 12), 1 << 12), min_size=1, max_size=70).map(
        lambda halves: (np.array(halves) * 0.001).astype(dtype)
    )


@every_type
@settings(max_examples=120)
@given(data=st.data(), bound=st.floats(1e-320, 1e308), rel=st.floats(1e-12, 0.999))
def test_any_values_stay_within_any_bound(
    dtype: np.dtype, data: st.DataObject, bound: float, rel: float, stream: Stream
) -> None:
    values = data.draw(st.one_of(all_bits_of(dtype), near_a_step(dtype)))
    check_bound(values, round_trip(Bound(abs=bound), values, stream), bound)
    check_bound(values, round_trip(Bound(rel=rel), values, stream), rel * range_of(values))


@every_type
@settings(max_examples=60)
@given(magnitude=st.integers(-10, 10), ratio=st.integers(0, 26), factor=st.floats(1, 2))
@example(magnitude=0, ratio=3, factor=1.024)
def test_bounds_near_the_values_and_far_below_hold(
    dtype: np.dtype, magnitude: int, ratio: int, factor: float, stream: Stream
) -> None:
    bound = factor * 2.0 ** (magnitude - ratio)
    values = (np.random.default_rng(3).uniform(-1, 1, 500) * 2.0**magnitude).astype(dtype)
    check_bound(values, round_trip(Bound(abs=bound), values, stream), bound)


@every_type
@pytest.mark.parametrize("spacings", range(1, 9))
def test_an_error_just_above_the_bound_is_detected(dtype: np.dtype, spacings: int, stream: Stream) -> None:
    """Use a bound just below a multiple of the spacing, which the caller's type rounds up."""
    bound = float(np.nextafter(spacings * float(ml_dtypes.finfo(dtype).eps), 0))
    values = np.random.default_rng(spacings).uniform(1, 2, 3000).astype(dtype)
    check_bound(values, round_trip(Bound(abs=bound), values, stream), bound)


@every_type
def test_nan_and_infinity_are_exact(dtype: np.dtype, stream: Stream) -> None:
    values = np.resize(special_values(dtype), 1100)
    for codec in (Bound(abs=1e-3), Bound(rel=1e-3)):
        check_bound(values, round_trip(codec, values, stream), 0)
    mixed = np.random.default_rng(0).normal(0, 1, 2000).astype(dtype)
    mixed[[0, 40, 1999]] = special_values(dtype)[[14, 17, 20]]
    check_bound(mixed, round_trip(Bound(abs=0.01), mixed, stream), 0.01)


@every_type
def test_no_finite_value_at_all(dtype: np.dtype, stream: Stream) -> None:
    values = np.resize(special_values(dtype)[12:], 100)
    assert same_bits(round_trip(Bound(rel=0.1), values, stream), values)


@every_type
def test_a_constant_chunk_with_a_relative_bound_is_exact_and_small(dtype: np.dtype, stream: Stream) -> None:
    values = np.full(50_000, 0.1, dtype)
    data = encode(Bound(rel=1e-3), values, stream)
    assert same_bits(decoded(Bound(rel=1e-3), data, values, stream), values)
    assert values.nbytes / len(data) > 10


def ratio(codec: Bound, values: np.ndarray, stream: Stream) -> float:
    return values.nbytes / len(encode(codec, values, stream))


@pytest.mark.parametrize(("name", "least"), [("float32", 3.6), ("float64", 7.0), ("float16", 1.5), ("bfloat16", 1.5)])
def test_normal_values_compress(name: str, least: float, stream: Stream) -> None:
    values = np.random.default_rng(0).normal(0, 0.02, 1 << 18).astype(FLOATS[name])
    assert ratio(Bound(abs=0.01 * 0.02), values, stream) > least


@pytest.mark.parametrize(("name", "least"), [("float32", 6.0), ("float64", 12.0), ("float16", 2.5), ("bfloat16", 1.5)])
def test_smooth_values_compress_better(name: str, least: float, stream: Stream) -> None:
    values = np.sin(np.arange(1 << 18) / 200).astype(FLOATS[name])
    assert ratio(Bound(rel=1e-3), values, stream) > least


@every_type
@pytest.mark.parametrize("op", REDUCTIONS)
def test_decode_and_reduce(dtype: np.dtype, op: str, stream: Stream) -> None:
    random, codec = np.random.default_rng(5), Bound(abs=0.01)
    target, arriving = (random.normal(0, 1, 3001).astype(dtype) for _ in range(2))
    arriving[:64] = 200 if dtype.itemsize == 2 else 1e30  # stored exactly: constant blocks and a mixed one
    arriving[100] = arriving[0]
    data = encode(codec, arriving, stream)
    result = reduced(codec, data, target, op, stream)
    expected = REDUCTIONS[op](target, decoded(codec, data, arriving, stream))
    if dtype.itemsize > 2 or op in ("min", "max"):
        assert same_bits(result, expected)
    else:  # decoded values are added before they are rounded to 16 bits
        within = 0.01 if dtype == FLOATS["bfloat16"] else 0.001
        np.testing.assert_allclose(result.astype(np.float64), expected.astype(np.float64), rtol=within, atol=within)
