"""Strided arrays as the pack kernels want them: few dimensions, each as long as possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["coalesce"]


def coalesce(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and byte strides of the same elements in the same (C) order with as few dimensions as will do.

    There is always at least one: a scalar becomes one element, an empty array becomes a row of none.
    """
    if 0 in shape:
        return (0,), (itemsize,)
    merged: list[tuple[int, int]] = []
    for length, stride in zip(shape, strides, strict=True):
        if length == 1:
            continue
        if merged and merged[-1][1] == length * stride:
            length *= merged.pop()[0]
        merged.append((length, stride))
    lengths, steps = zip(*merged or [(1, itemsize)], strict=True)
    return lengths, steps
