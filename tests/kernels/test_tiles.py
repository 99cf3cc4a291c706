"""The tile kernels: tiles are joined without gaps, and invalid sizes are rejected."""

from __future__ import annotations

from itertools import accumulate
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


def whole_words(tiles: int) -> np.ndarray:
    return 4 * some_sizes(tiles, SMALLEST // 4, LARGEST // 4)


def offsets_of(machine: Machine, sizes: np.ndarray) -> tuple[np.ndarray, int]:
    offsets, total = machine.zeros(sizes.size + 1, np.uint64), machine.zeros(1, np.uint64)
    offsets[-1] = 99
    machine.launch("tiles_offsets", 1, machine.copy(sizes), sizes.size, offsets, total)
    assert offsets[-1] == 99
    return offsets[:-1], int(total[0])


@pytest.mark.parametrize("tiles", COUNTS)
@pytest.mark.parametrize("largest", [0, LARGEST, 2**32 - 1])
def test_offsets_are_exclusive_sums(machine: Machine, tiles: int, largest: int) -> None:
    sizes = some_sizes(tiles, 0, largest)
    offsets, total = offsets_of(machine, sizes)
    ends = np.cumsum(sizes, dtype=np.uint64)
    assert np.array_equal(offsets, ends - sizes)
    assert total == sizes.sum(dtype=np.uint64)


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("tiles", COUNTS)
def test_join_closes_the_gaps(machine: Machine, tiles: int, calls: int) -> None:
    sizes = some_sizes(tiles, 0)
    starts = np.arange(tiles, dtype=np.uint64) * (LARGEST + 3)
    slots = machine.copy(np.random.default_rng(0).integers(0, 256, tiles * (LARGEST + 3), np.uint8))
    offsets, total = offsets_of(machine, sizes)
    joined = machine.zeros(total + 8, np.uint8)
    machine.launch("tiles_join", tiles, slots, machine.copy(starts), machine.copy(sizes), offsets, joined, calls=calls)
    expected = b"".join(slots[start : start + size].tobytes() for start, size in zip(starts, sizes, strict=True))
    assert joined.tobytes() == expected + bytes(8)


def test_join_follows_offsets_with_gaps(machine: Machine) -> None:
    slots, joined = machine.copy(np.arange(1, 31, dtype=np.uint8)), machine.zeros(50, np.uint8)
    starts, sizes, offsets = ([0, 10, 20], np.uint64), ([10, 10, 10], np.uint32), ([0, 15, 40], np.uint64)
    machine.launch("tiles_join", 3, slots, machine.copy(*starts), machine.copy(*sizes), machine.copy(*offsets), joined)
    assert joined.tolist() == [*range(1, 11), *[0] * 5, *range(11, 21), *[0] * 15, *range(21, 31)]


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
    offsets, total = offsets_of(machine, sizes)
    machine.launch("tiles_join", 100, stream, machine.copy(starts), machine.copy(sizes), offsets, stream)
    assert stream[:total].tobytes() == expected


def opened(
    machine: Machine,
    sizes: np.ndarray,
    available: int,
    smallest: int = SMALLEST,
    largest: int = LARGEST,
    shift: int = 0,
) -> tuple[list[int], int]:
    """Open a stream at `shift` bytes off alignment; return the offsets and the status bits set."""
    stream = machine.zeros(4 * sizes.size + shift, np.uint8)
    stream[shift:] = np.frombuffer(sizes.astype("<u4").tobytes(), np.uint8)
    offsets, status = machine.zeros(sizes.size + 2, np.uint64), machine.copy([OTHER], np.uint64)
    offsets[...] = 99
    machine.launch("tiles_open", 1, stream[shift:], sizes.size, available, offsets, smallest, largest, status)
    assert offsets[-1] == 99
    assert int(status[0]) & OTHER
    return offsets[:-1].tolist(), int(status[0]) & ~OTHER


def check_refused(machine: Machine, sizes: np.ndarray, available: int) -> None:
    assert opened(machine, sizes, available) == ([0] * (sizes.size + 1), BAD_STREAM)


@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("tiles", COUNTS)
def test_open_finds_the_offsets(machine: Machine, tiles: int, shift: int) -> None:
    sizes = whole_words(tiles)
    ends = [0, *np.cumsum(sizes, dtype=np.uint64).tolist()]
    assert opened(machine, sizes, ends[-1], shift=shift) == (ends, 0)


@pytest.mark.parametrize("available", [-1, 1, 2**62])
@pytest.mark.parametrize("tiles", COUNTS)
def test_open_rejects_a_wrong_sum(machine: Machine, tiles: int, available: int) -> None:
    check_refused(machine, whole_words(tiles), available)


@pytest.mark.parametrize("error", [-4, -1, 1, 4])
@pytest.mark.parametrize("tiles", COUNTS[1:])
def test_open_rejects_a_sum_that_is_slightly_off(machine: Machine, tiles: int, error: int) -> None:
    sizes = whole_words(tiles)
    check_refused(machine, sizes, int(sizes.sum()) + error)


@pytest.mark.parametrize("wrong", [0, SMALLEST - 4, LARGEST + 4, 2**31, 2**32 - 4, 13, 14, 15])
@pytest.mark.parametrize("where", [0, 31, 32, 69])
def test_open_rejects_a_size_out_of_range_or_not_a_multiple_of_4(machine: Machine, where: int, wrong: int) -> None:
    sizes = whole_words(70)
    sizes[where] = wrong
    check_refused(machine, sizes, int(sizes.sum(dtype=np.uint64)))


def test_sums_beyond_32_bits_do_not_wrap(machine: Machine) -> None:
    sizes = np.array([2**32 - 4, 2**32 - 4, 12], np.uint32)
    assert opened(machine, sizes, 4, 0, 2**32 - 1)[1] == BAD_STREAM
    assert opened(machine, sizes, 2**33 + 4, 0, 2**32 - 1) == ([0, 2**32 - 4, 2**33 - 8, 2**33 + 4], 0)


believable = st.integers(SMALLEST // 4, LARGEST // 4).map(lambda words: 4 * words)


@given(st.lists(believable | st.integers(0, 2**32 - 1), max_size=80), st.none() | st.integers(0, 8000))
def test_open_agrees_with_a_simple_check(machine: Machine, sizes: list[int], available: int | None) -> None:
    available = sum(sizes) if available is None else available
    good = all(SMALLEST <= size <= LARGEST and size % 4 == 0 for size in sizes) and sum(sizes) == available
    offsets, status = opened(machine, np.array(sizes, np.uint32), available)
    assert status == (0 if good else BAD_STREAM)
    assert offsets == ([0, *accumulate(sizes)] if good else [0] * (len(sizes) + 1))
