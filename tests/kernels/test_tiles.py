"""Tiles are joined without gaps and found again, and invalid sizes are rejected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from machines import Machine

COUNTS = [0, 1, 31, 32, 33, 64, 1000]
BAD_STREAM, OTHER = 1, 1 << 40
SMALLEST, LARGEST = 8, 100


def some_sizes(tiles: int, low: int = SMALLEST, high: int = LARGEST) -> np.ndarray:
    return np.random.default_rng(tiles).integers(low, high, tiles, np.uint32, endpoint=True)


def join(
    machine: Machine,
    slots: np.ndarray,
    starts: np.ndarray,
    sizes: np.ndarray,
    to: np.ndarray,
    padding: int = 0,
    **calls: int,
) -> int:
    """Join tiles, and return what the kernel says is the sum of their sizes."""
    total = machine.zeros(1, np.uint64)
    machine.launch(
        "tiles_join", starts.size, slots, machine.copy(starts), sizes, starts.size, padding, to, total, **calls
    )
    return int(total[0])


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("tiles", COUNTS)
def test_join_closes_the_gaps(machine: Machine, tiles: int, calls: int) -> None:
    sizes = some_sizes(tiles, 0)
    starts = np.arange(tiles, dtype=np.uint64) * (LARGEST + 3)
    slots = machine.copy(np.random.default_rng(0).integers(0, 256, tiles * (LARGEST + 3), np.uint8))
    joined = machine.zeros(sizes.sum() + 8, np.uint8)
    assert join(machine, slots, starts, machine.copy(sizes), joined, calls=calls) == sizes.sum(dtype=np.uint64)
    expected = b"".join(slots[start : start + size].tobytes() for start, size in zip(starts, sizes, strict=True))
    assert joined.tobytes() == expected + bytes(8)


@pytest.mark.parametrize("shift", [0, 4, 16])
@pytest.mark.parametrize("size", [1, 16, 127, 2047, 2048, 4096, 9999])
def test_join_moves_long_tiles(machine: Machine, size: int, shift: int) -> None:
    slots = machine.copy(np.random.default_rng(size).integers(0, 256, 2 * size + 32, np.uint8))
    starts, sizes = np.array([shift, size + 32], np.uint64), machine.copy([size, size], np.uint32)
    joined = machine.zeros(2 * size + 1, np.uint8)
    assert join(machine, slots, starts, sizes, joined) == 2 * size
    assert joined.tobytes() == slots[shift : shift + size].tobytes() + slots[size + 32 :].tobytes() + b"\0"


@pytest.mark.parametrize("padding", [0, 1])
def test_join_clears_what_is_behind_the_sizes(machine: Machine, padding: int) -> None:
    sizes, slots, joined = (
        machine.copy([4, 8, 77, 77], np.uint32),
        machine.zeros(24, np.uint8),
        machine.zeros(24, np.uint8),
    )
    assert join(machine, slots, np.array([0, 12], np.uint64), sizes, joined, padding) == 12
    assert sizes.tolist() == [4, 8, 0 if padding else 77, 77]


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_join_in_place_after_workers_appended(machine: Machine, workers: int) -> None:
    if machine.name == "cuda":
        pytest.skip("a GPU joins from separate slots")
    sizes = some_sizes(100, 0)
    starts = np.zeros(100, np.uint64)
    for tiles in np.array_split(np.arange(100), workers):
        starts[tiles] = tiles[0] * LARGEST + np.cumsum(sizes[tiles]) - sizes[tiles]
    stream = machine.copy(np.random.default_rng(0).integers(0, 256, 100 * LARGEST, np.uint8))
    expected = b"".join(stream[start : start + size].tobytes() for start, size in zip(starts, sizes, strict=True))
    total = join(machine, stream, starts, machine.copy(sizes), stream)
    assert stream[:total].tobytes() == expected


# Reading: the tiles are those of `delta`, whose sizes can be chosen: 32 widths, and as many planes, all zero.

VALUES, WIDTHS, WIDEST = 1024, 32, 16
LONGEST = WIDTHS + 4 * WIDTHS * WIDEST


def tile_of(size: int) -> bytes:
    """Return a tile of this size that changes nothing."""
    planes = (size - WIDTHS) // 4
    widths = [planes // WIDTHS + (n < planes % WIDTHS) for n in range(WIDTHS)]
    return bytes(widths).ljust(size, b"\0")


def valid(size: int) -> bool:
    return WIDTHS <= size <= LONGEST and size % 4 == 0


def read(machine: Machine, sizes: list[int], available: int, calls: int = 1) -> int:
    """Decode a stream onto zeros; return the status. Without an error all values must be those of the base."""
    data = b"".join(tile_of(size) if valid(size) else bytes(min(size, LONGEST)) for size in sizes)
    tiles = machine.copy(np.frombuffer(data[: max(0, available)].ljust(max(0, available), b"\0"), np.uint8))
    count = len(sizes) * VALUES
    base = machine.copy(np.random.default_rng(count).integers(0, 1 << 16, count, np.uint16))
    back, status = machine.zeros(count, np.uint16), machine.copy([OTHER], np.uint64)
    args = (machine.copy(np.array(sizes, np.uint32)), tiles, available, base, count, back, status)
    machine.launch("delta_decode_u16", len(sizes), *args, calls=calls)
    assert int(status[0]) & OTHER
    assert int(status[0]) & BAD_STREAM or np.array_equal(back, base)
    return int(status[0]) & ~OTHER


def valid_sizes(tiles: int) -> list[int]:
    return [4 * int(words) for words in some_sizes(tiles, WIDTHS // 4, LONGEST // 4)]


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("tiles", [1, 31, 32, 33, 64, 200])
def test_reading_finds_every_tile(machine: Machine, tiles: int, calls: int) -> None:
    sizes = valid_sizes(tiles)
    assert read(machine, sizes, sum(sizes), calls) == 0


@pytest.mark.parametrize("error", [-4, -1, 1, 4, 5000])
@pytest.mark.parametrize("tiles", [1, 31, 32, 33, 64])
def test_reading_rejects_a_wrong_sum(machine: Machine, tiles: int, error: int) -> None:
    sizes = valid_sizes(tiles)
    assert read(machine, sizes, sum(sizes) + error) == BAD_STREAM
    assert read(machine, sizes, -1) == BAD_STREAM


@pytest.mark.parametrize("wrong", [0, 1, WIDTHS - 4, LONGEST + 4, 2**31, 2**32 - 4, 133, 134, 135])
@pytest.mark.parametrize("where", [0, 31, 32, 69])
def test_reading_rejects_a_size_out_of_range_or_not_a_multiple_of_4(machine: Machine, where: int, wrong: int) -> None:
    sizes = valid_sizes(70)
    sizes[where] = wrong
    assert read(machine, sizes, min(sum(sizes), 70 * LONGEST)) == BAD_STREAM


believable = st.integers(WIDTHS // 4, LONGEST // 4).map(lambda words: 4 * words)


@given(st.lists(believable | st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.none() | st.integers(0, 80_000))
def test_reading_agrees_with_a_simple_check(machine: Machine, sizes: list[int], available: int | None) -> None:
    available = min(sum(sizes), 40 * LONGEST) if available is None else available
    good = all(map(valid, sizes)) and sum(sizes) == available
    assert read(machine, sizes, available) == (0 if good else BAD_STREAM)
