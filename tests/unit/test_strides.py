"""Layout functions of `device.buffer`: contiguity, overlap and coalescing, compared with numpy."""

from __future__ import annotations

import operator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_gpucomp.device.buffer import coalesce_dimensions, contiguous_layout, may_overlap

lengths = st.lists(st.integers(0, 3), max_size=3)


@given(lengths, st.data())
def test_overlapping_elements_are_always_found(lengths: list[int], data: st.DataObject) -> None:
    strides = tuple(data.draw(st.integers(-12, 12)) for _ in lengths)
    offsets = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*lengths)]
    ordered = sorted(offsets)
    shared = any(b - a < 2 for a, b in pairwise(ordered))
    assert may_overlap(tuple(lengths), strides, 2) >= shared


@given(lengths, st.permutations([0, 1, 2]))
def test_contiguous_as_in_numpy(lengths: list[int], axes: list[int]) -> None:
    values = np.zeros(lengths, np.int16)
    values = values.transpose([axis for axis in axes if axis < values.ndim])
    shape, strides = contiguous_layout(values.shape, values.strides, 2)
    assert (strides is None) == (values.flags.c_contiguous or values.flags.f_contiguous)
    assert shape == (values.shape if strides or values.flags.c_contiguous else values.shape[::-1])
    assert strides in (None, values.strides)


@given(lengths)
def test_contiguous_arrays_never_overlap(lengths: list[int]) -> None:
    values = np.zeros(lengths, np.int16)
    assert not may_overlap(values.shape, values.strides, 2)


BLOCK = np.arange(2 * 3 * 4 * 5, dtype=np.int32).reshape(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("array", "shape", "strides"),
    [
        (BLOCK, (120,), (4,)),
        (BLOCK[:, :, :, :4], (24, 4), (20, 4)),
        (BLOCK[:, 1:], (2, 40), (240, 4)),
        (BLOCK[:, 1:2], (2, 20), (240, 4)),
        (BLOCK[::-1], (2, 60), (-240, 4)),
        (BLOCK.reshape(-1)[::-1].reshape(2, 3, 20), (120,), (-4,)),
        (BLOCK.transpose(2, 3, 0, 1), (20, 6), (4, 80)),
        (BLOCK[1, 2, 3, 4], (1,), (4,)),
        (BLOCK[:0], (0,), (4,)),
        (np.broadcast_to(np.int32(7), (5, 6)), (30,), (0,)),
    ],
)
def test_adjacent_dimensions_are_merged(array: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert coalesce_dimensions(array.shape, array.strides, array.itemsize) == (shape, strides)


@st.composite
def views(draw: st.DrawFn) -> np.ndarray:
    shape = draw(st.lists(st.integers(0, 4), max_size=5))
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int16).reshape(shape)
    steps = st.sampled_from([slice(None), slice(None, None, 2), slice(None, None, -1), slice(1, None), slice(0, 1)])
    array = array[(*(draw(steps) for _ in shape), ...)]
    return array.transpose(draw(st.permutations(range(array.ndim))))


def offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    return [sum(map(operator.mul, index, strides)) for index in np.ndindex(shape)]


@given(views())
def test_coalescing_keeps_every_offset(array: np.ndarray) -> None:
    shape, strides = coalesce_dimensions(array.shape, array.strides, array.itemsize)
    assert offsets(shape, strides) == offsets(array.shape, array.strides)


@given(views())
def test_coalescing_is_idempotent(array: np.ndarray) -> None:
    shape, strides = coalesce_dimensions(array.shape, array.strides, array.itemsize)
    assert coalesce_dimensions(shape, strides, array.itemsize) == (shape, strides)
    assert len(shape) == 1 or 1 not in shape
