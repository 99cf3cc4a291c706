"""Shapes and strides, against numpy and against counting."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpi_gpucomp.device.buffer import overlaps, simplify

lengths = st.lists(st.integers(0, 3), max_size=3)


@given(lengths, st.data())
def test_overlaps_never_misses_two_elements_in_one_place(lengths: list[int], data: st.DataObject) -> None:
    strides = tuple(data.draw(st.integers(-12, 12)) for _ in lengths)
    offsets = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*lengths)]
    ordered = sorted(offsets)
    clash = any(b - a < 2 for a, b in pairwise(ordered))
    assert overlaps(tuple(lengths), strides, 2) >= clash


@given(lengths, st.permutations([0, 1, 2]))
def test_contiguous_is_what_numpy_calls_so(lengths: list[int], axes: list[int]) -> None:
    values = np.zeros(lengths, np.int16)
    values = values.transpose([axis for axis in axes if axis < values.ndim])
    shape, strides = simplify(values.shape, values.strides, 2)
    assert (strides is None) == (values.flags.c_contiguous or values.flags.f_contiguous)
    assert shape == (values.shape if strides or values.flags.c_contiguous else values.shape[::-1])
    assert strides in (None, values.strides)


@given(lengths)
def test_dense_arrays_never_overlap(lengths: list[int]) -> None:
    values = np.zeros(lengths, np.int16)
    assert not overlaps(values.shape, values.strides, 2)
