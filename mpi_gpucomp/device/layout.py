"""Shapes and strides: which are contiguous, and which let every element be written on its own."""

from __future__ import annotations

from math import prod

__all__ = ["dense", "overlaps", "simplify"]

Shape = tuple[int, ...]


def dense(shape: Shape, strides: Shape, itemsize: int) -> bool:
    """Say whether the elements lie one behind the other, the last dimension fastest."""
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


def simplify(shape: Shape, strides: Shape | None, itemsize: int) -> tuple[Shape, Shape | None]:
    """Return the shape, and strides in bytes or None where the elements are contiguous in memory.

    Elements in Fortran's order are contiguous too: their shape is returned reversed, as the memory has it.
    """
    if strides is None or 0 in shape or dense(shape, strides, itemsize):
        return shape, None
    if dense(shape[::-1], strides[::-1], itemsize):
        return shape[::-1], None
    return shape, strides


def overlaps(shape: Shape, strides: Shape, itemsize: int) -> bool:
    """Say whether two elements may share a byte; layouts that interleave without sharing count as if they did."""
    if prod(shape) < 2:
        return False
    reach = itemsize
    steps = [(abs(stride), length) for stride, length in zip(strides, shape, strict=True) if length > 1]
    for stride, length in sorted(steps):
        if stride < reach:
            return True
        reach += stride * (length - 1)
    return False
