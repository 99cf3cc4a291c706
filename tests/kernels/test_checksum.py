"""The checksum kernels equal zlib's Adler-32 for any length, alignment and split."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from machines import Machine

TILE = 4096
LENGTHS = [0, 1, 31, 32, 33, 511, 512, 513, 1000, TILE - 1, TILE, TILE + 1, 32 * TILE, 33 * TILE + 77]


def checksum(machine: Machine, data: np.ndarray, calls: int = 1) -> int:
    tiles = -(-data.size // TILE)
    partials, result = machine.zeros(tiles + 1, np.uint64), machine.zeros(2, np.uint32)
    partials[-1] = result[1] = 99
    machine.launch("checksum_tiles", tiles, data, data.size, partials, calls=calls)
    machine.launch("checksum_join", 1, partials, data.size, result)
    assert partials[-1] == result[1] == 99
    return int(result[0])


@pytest.mark.parametrize("offset", [0, 1, 7])
@pytest.mark.parametrize("length", LENGTHS)
def test_equals_zlib(machine: Machine, length: int, offset: int) -> None:
    data = machine.copy(np.random.default_rng(length).integers(0, 256, length + offset, np.uint8))[offset:]
    assert checksum(machine, data) == zlib.adler32(data.tobytes())


@pytest.mark.parametrize("length", [TILE, 700 * TILE + 5])
def test_the_largest_sums_fit(machine: Machine, length: int) -> None:
    data = machine.copy(np.full(length, 255, np.uint8))
    assert checksum(machine, data) == zlib.adler32(data.tobytes())


@pytest.mark.parametrize("calls", [2, 5])
def test_split_ranges_give_the_same_result(machine: Machine, calls: int) -> None:
    data = machine.copy(np.arange(11 * TILE + 3, dtype=np.uint32).astype(np.uint8))
    assert checksum(machine, data, calls) == zlib.adler32(data.tobytes())


@given(st.binary(max_size=3 * TILE))
def test_equals_zlib_on_any_bytes(machine: Machine, data: bytes) -> None:
    assert checksum(machine, machine.copy(np.frombuffer(data, np.uint8))) == zlib.adler32(data)
