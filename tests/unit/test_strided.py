"""Coalescing keeps every element's place, and leaves no two dimensions that could be one."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_gpucomp.device.buffer import coalesce

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
def test_dimensions_that_continue_each_other_become_one(
    array: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    assert coalesce(array.shape, array.strides, array.itemsize) == (shape, strides)


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
def test_every_element_keeps_its_place(array: np.ndarray) -> None:
    shape, strides = coalesce(array.shape, array.strides, array.itemsize)
    assert offsets(shape, strides) == offsets(array.shape, array.strides)


@given(views())
def test_nothing_is_left_to_merge(array: np.ndarray) -> None:
    shape, strides = coalesce(array.shape, array.strides, array.itemsize)
    assert coalesce(shape, strides, array.itemsize) == (shape, strides)
    assert len(shape) == 1 or 1 not in shape
