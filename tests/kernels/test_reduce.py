"""The reduce kernels, compared with numpy: every type, operation, length and special value."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
from machines import Host

from mpi_gpucomp.device.build import build, kernels_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    from machines import Machine

TILE = 1024
LENGTHS = [0, 1, 31, 32, 33, TILE - 1, TILE, TILE + 1, 3 * TILE + 77]

WHOLE = {"u8": "u1", "i8": "i1", "u16": "u2", "i16": "i2", "u32": "u4", "i32": "i4", "u64": "u8", "i64": "i8"}
FLOATS = {"f16": "f2", "bf16": ml_dtypes.bfloat16, "f32": "f4", "f64": "f8"}
COMPLEX = {"c64": "c8", "c128": "c16"}
DTYPES = {suffix: np.dtype(dtype) for suffix, dtype in {**WHOLE, **FLOATS, **COMPLEX}.items()}

ANY = {"replace": 0, "sum": 1, "prod": 2}
ORDERED = {"min": 3, "max": 4}
BITS = {"band": 5, "bor": 6, "bxor": 7, "land": 8, "lor": 9, "lxor": 10}
OPS = {**ANY, **ORDERED, **BITS}


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiply with every step rounded; numpy fuses some for complex numbers."""
    if a.dtype.kind != "c":
        return np.asarray(a * b)
    result: np.ndarray = np.empty_like(a)
    result.real = a.real * b.real - a.imag * b.imag
    result.imag = a.real * b.imag + a.imag * b.real
    return result


EXPECTED: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "replace": lambda there, arriving: arriving,
    "sum": np.add,
    "prod": product,
    "min": lambda there, arriving: np.where(arriving < there, arriving, there),
    "max": lambda there, arriving: np.where(arriving > there, arriving, there),
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
}

CASES = [
    (suffix, op)
    for suffix in DTYPES
    for op in (OPS if suffix in WHOLE else ANY if suffix in COMPLEX else {**ANY, **ORDERED})
]
FOREIGN = [(suffix, op) for suffix in DTYPES for op in OPS if (suffix, op) not in CASES]


def expected(op: str, there: np.ndarray, arriving: np.ndarray) -> np.ndarray:
    """Compute with numpy, 16-bit floats as float32."""
    dtype = there.dtype
    if op != "replace" and dtype in (np.float16, ml_dtypes.bfloat16):
        there, arriving = there.astype(np.float32), arriving.astype(np.float32)
    with np.errstate(all="ignore"):
        return EXPECTED[op](there, arriving).astype(dtype)


def some(dtype: np.dtype, count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    if dtype.kind in "ui":
        values = np.frombuffer(random.bytes(count * dtype.itemsize), dtype).copy()
        values[::3] = 0  # so that logical operations see both
        return values
    if dtype.kind == "c":
        return (random.normal(size=count) + 1j * random.normal(size=count)).astype(dtype)
    return random.normal(size=count).astype(dtype)


def same(left: np.ndarray, right: np.ndarray) -> bool:
    """Compare bit for bit, with all NaNs equal."""
    bits = f"u{left.itemsize}"
    differ = left.view(bits) != right.view(bits)
    return bool(np.all(np.isnan(left[differ]) & np.isnan(right[differ])))


@pytest.mark.parametrize(("suffix", "op"), CASES)
def test_equals_numpy(machine: Machine, suffix: str, op: str) -> None:
    dtype = DTYPES[suffix]
    for count in LENGTHS:
        # Unaligned by one element, and with one more behind, which must not change.
        to = machine.copy(some(dtype, count + 2, 1))
        arriving = machine.copy(some(dtype, count + 1, 2))[1:]
        wanted = to.copy()
        wanted[1:-1] = expected(op, to[1:-1], arriving)
        machine.launch(f"reduce_{suffix}", -(-count // TILE), to[1:], arriving, count, OPS[op])
        assert to.tobytes() == wanted.tobytes(), count


@pytest.mark.parametrize(("suffix", "op"), FOREIGN)
def test_an_undefined_operation_changes_nothing(machine: Machine, suffix: str, op: str) -> None:
    to, arriving = machine.copy(some(DTYPES[suffix], 100, 1)), machine.copy(some(DTYPES[suffix], 100, 2))
    before = to.tobytes()
    machine.launch(f"reduce_{suffix}", 1, to, arriving, 100, OPS[op])
    assert to.tobytes() == before


@pytest.mark.parametrize("suffix", DTYPES)
def test_split_ranges_give_the_same_result(machine: Machine, suffix: str) -> None:
    count = 5 * TILE + 5
    there, arriving = some(DTYPES[suffix], count, 1), machine.copy(some(DTYPES[suffix], count, 2))
    to = machine.copy(there)
    machine.launch(f"reduce_{suffix}", 6, to, arriving, count, OPS["sum"], calls=4)
    assert to.tobytes() == expected("sum", there, arriving).tobytes()


def special(dtype: np.dtype) -> np.ndarray:
    limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    largest, smallest = limits.max, limits.smallest_subnormal
    plain = [0.0, 1.0, 1.5, float(smallest), 3 * float(smallest), float(largest), float(largest) / 2, np.inf]
    return np.array([*plain, *(-x for x in plain), np.nan], dtype)


@pytest.mark.parametrize("op", [*ANY, *ORDERED])
@pytest.mark.parametrize("suffix", FLOATS)
def test_all_pairs_of_special_values(machine: Machine, suffix: str, op: str) -> None:
    values = special(DTYPES[suffix])
    there, arriving = (grid.reshape(-1) for grid in np.meshgrid(values, values, indexing="ij"))
    to = machine.copy(there)
    machine.launch(f"reduce_{suffix}", 1, to, machine.copy(arriving), to.size, OPS[op])
    assert same(to, expected(op, there, arriving))


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("suffix", FLOATS)
def test_min_and_max_keep_a_nan_and_ignore_an_incoming_one(machine: Machine, suffix: str, op: str) -> None:
    to = machine.copy([np.nan, 1.0], DTYPES[suffix])
    machine.launch(f"reduce_{suffix}", 1, to, machine.copy([1.0, np.nan], DTYPES[suffix]), 2, OPS[op])
    assert np.isnan(to[0])
    assert to[1] == 1


@pytest.mark.parametrize("other", [0.0, 1.0, -1 / 3, 2.0**-14, 60000.0])
@pytest.mark.parametrize("op", ["sum", "prod"])
@pytest.mark.parametrize("suffix", ["f16", "bf16"])
def test_every_16_bit_float_rounds_once(machine: Machine, suffix: str, op: str, other: float) -> None:
    there = np.arange(2**16, dtype=np.uint16).view(DTYPES[suffix])
    arriving = np.full(there.size, other, DTYPES[suffix])
    to = machine.copy(there)
    machine.launch(f"reduce_{suffix}", there.size // TILE, to, machine.copy(arriving), to.size, OPS[op])
    assert same(to, expected(op, there, arriving))


@pytest.mark.parametrize("suffix", FLOATS)
def test_replace_keeps_every_bit_of_a_nan(machine: Machine, suffix: str) -> None:
    dtype = DTYPES[suffix]
    infinity = np.array([np.inf], dtype).view(f"u{dtype.itemsize}")
    to, signalling = machine.zeros(1, dtype), machine.copy(infinity + infinity.dtype.type(1)).view(dtype)
    machine.launch(f"reduce_{suffix}", 1, to, signalling, 1, OPS["replace"])
    assert to.tobytes() == signalling.tobytes()


STORE_LANES = """
#include "reduce.h"

template <int N, class T, class X>
DEVICE void store(i64 first, i64 last, T *to, const X *from, i64 count, i64 op) {
    FOR_TILES(t) {
        Lane<X> x[N];
        FOR_LANES(l) {
            for (int j = 0; j < N; ++j) x[j][l] = from[t * N * LANES + N * l + j];
        }
        store_lanes(to, t * N * LANES, count, x, op);
    }
}
#define STORE(name, T, X) \\
    KERNEL(store_1_##name, T *to, const X *from, i64 count, i64 op) { store<1>(first, last, to, from, count, op); } \\
    KERNEL(store_4_##name, T *to, const X *from, i64 count, i64 op) { store<4>(first, last, to, from, count, op); }
STORE(i32, i32, i32) STORE(f32, float, float) STORE(f64, double, double)
STORE(f16, f16, f16) STORE(bf16, bf16, bf16) STORE(wide_f16, f16, float) STORE(wide_bf16, bf16, float)
"""


@pytest.fixture(scope="module")
def storing(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    folder = tmp_path_factory.mktemp("store_lanes")
    (folder / "store.cu").write_text(STORE_LANES)
    library = build(folder, folder, only="baseline", extra_flags=[f"-I{kernels_directory()}"])[0]
    return Host("baseline", library)


@pytest.mark.parametrize("op", [*ANY, *ORDERED])
@pytest.mark.parametrize("each", [1, 4])
@pytest.mark.parametrize("suffix", ["i32", "f32", "f64", "f16", "bf16", "wide_f16", "wide_bf16"])
def test_decoders_store_within_bounds(storing: Machine, suffix: str, each: int, op: str) -> None:
    dtype = DTYPES[suffix.removeprefix("wide_")]
    arriving = storing.copy(some(dtype, 256, 2).astype(np.float32 if "wide" in suffix else dtype))
    for count in (0, 1, 31, 32, 33, 127, 128, 129, 200, 256):
        to = storing.copy(some(dtype, 256, 1))
        wanted = to.copy()
        wanted[:count] = expected(op, to[:count], arriving[:count].astype(dtype))
        storing.launch(f"store_{each}_{suffix}", 256 // (32 * each), to, arriving, count, OPS[op])
        assert to.tobytes() == wanted.tobytes(), count
