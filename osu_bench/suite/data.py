"""Message data that every rank can generate and verify without communication.

A pool of values is drawn once. Each message repeats the pool from an offset that depends on its seed, so a rank knows
what every other rank sends, and compares results block by block without a second copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.cli.codecs import read_sample
from mpi_gpucomp.errors import BufferSpecError, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["KINDS", "TYPES", "Values"]

Array = np.ndarray[Any, Any]

POOL_BYTES = 1 << 24
STRIDE = 1_000_003
"""Offset between messages of consecutive seeds; not a multiple of a chunk or block."""
DEVIATION = 0.02


def _weights(count: int, random: np.random.Generator) -> Array:
    return random.normal(0, DEVIATION, count).astype(np.float32)


def _weights_bf16(count: int, random: np.random.Generator) -> Array:
    return _weights(count, random).astype(bfloat16())


def _gradients(count: int, random: np.random.Generator) -> Array:
    """Draw heavy-tailed values whose scale varies by row, like gradients."""
    rows = -(-count // 1024)
    scales = np.repeat(1e-3 * np.exp(random.normal(0, 1, rows)), 1024)[:count]
    return (scales * random.standard_t(4, count)).astype(np.float32)


def _smooth(count: int, random: np.random.Generator) -> Array:
    """Superpose waves of several lengths, like a simulated field."""
    place = np.arange(count)
    waves = [np.sin(place / length + random.uniform(0, 6)) / n for n, length in enumerate((9000, 700, 60), 1)]
    total: Array = np.sum(waves, axis=0).astype(np.float32)
    return total


def _zeros(count: int, random: np.random.Generator) -> Array:
    return np.zeros(count, np.float32)


def _random(count: int, random: np.random.Generator) -> Array:
    return random.integers(0, 256, count, np.uint8)


KINDS: dict[str, Callable[[int, np.random.Generator], Array]] = {
    "weights": _weights,
    "weights-bf16": _weights_bf16,
    "gradients": _gradients,
    "smooth": _smooth,
    "zeros": _zeros,
    "random": _random,
}
TYPES = {"mpi_char": np.uint8, "mpi_int": np.int32, "mpi_float": np.float32, "mpi_double": np.float64}
"""Element types by their names in the OSU benchmarks."""


def bfloat16() -> np.dtype[Any]:
    """Return the numpy dtype of bfloat16, from ml_dtypes."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise SpecError(
            "data weights-bf16",
            expected="the package ml_dtypes",
            got=str(error),
            remedy="pip install ml_dtypes, or choose other data.",
        ) from error
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


class Values:
    """The elements of messages, by seed."""

    def __init__(self, kind: str = "weights", element: str | None = None) -> None:
        """Use one of KINDS or a `.npy` file, converted to one of TYPES if `element` is given."""
        self.kind = kind
        self.pool = _typed(_pool(kind), element)
        self.dtype = self.pool.dtype

    @property
    def type_name(self) -> str:
        """The MPI name of the element type, or numpy's."""
        found = (name.upper() for name, dtype in TYPES.items() if self.dtype == dtype)
        return next(found, str(self.dtype).upper())

    def write(self, array: Array, seed: int) -> None:
        """Fill a message."""
        for piece, values in self._blocks(array, seed):
            piece[...] = values

    def wrong(self, array: Array, seed: int, tolerance: float = 0.0) -> int:
        """Count elements that differ from a message in any bit, or by more than `tolerance`."""
        return sum(differing(piece, values, tolerance) for piece, values in self._blocks(array, seed))

    def max_error(self, array: Array, seed: int) -> float:
        """Return the largest absolute difference from a message."""
        errors = (np.max(np.abs(block.astype(np.float64) - values)) for block, values in self._blocks(array, seed))
        return float(max(errors))

    def wrong_sum(self, array: Array, seeds: range, first: int = 0, tolerance: float = 0.0) -> int:
        """Count elements that differ from the sum of these messages, beginning at their element `first`."""
        rounding = len(seeds) * self._rounding()
        wrong, step = 0, 1 << 20
        for start in range(0, array.size, step):
            piece = array[start : start + step]
            total = np.zeros(piece.size, np.float64)
            for seed in seeds:
                self._add(total, seed, first + start)
            wrong += differing(piece, total.astype(np.float64), tolerance + rounding)
        return wrong

    def _rounding(self) -> float:
        """Return the rounding error of one addition."""
        if self.dtype.kind in "iu":
            return 0.0
        largest = float(np.max(np.abs(self.pool.astype(np.float64)))) or 1.0
        return largest * {2: 2.0**-7, 4: 2.0**-22, 8: 2.0**-51}[self.dtype.itemsize] * 8

    def _add(self, total: Array, seed: int, first: int) -> None:
        done = 0
        while done < total.size:
            start = (seed * STRIDE + first + done) % self.pool.size
            some = self.pool[start : start + total.size - done]
            total[done : done + some.size] += some.astype(np.float64)
            done += some.size

    def _blocks(self, array: Array, seed: int) -> Iterator[tuple[Array, Array]]:
        done, start = 0, seed * STRIDE % self.pool.size
        while done < array.size:
            values = self.pool[start : start + array.size - done]
            yield array[done : done + values.size], values
            done, start = done + values.size, 0


def _pool(kind: str) -> Array:
    if kind in KINDS:
        itemsize = {"weights-bf16": 2, "random": 1}.get(kind, 4)
        return KINDS[kind](POOL_BYTES // itemsize, np.random.default_rng(7))
    path = Path(kind)
    if path.suffix != ".npy":
        raise SpecError(
            "option --data",
            expected=f"{', '.join(KINDS)} or a .npy file",
            got=kind,
            remedy="Save your own values with numpy.save.",
        )
    values = read_sample(path)
    return values.array.view(bfloat16()) if values.dtype.name == "bfloat16" else values.array


def _typed(pool: Array, element: str | None) -> Array:
    """Convert to another float type, or reinterpret the bytes as integers."""
    if element is None:
        return pool
    dtype = np.dtype(TYPES[element])
    if dtype.kind == "f":
        return pool.astype(dtype)
    return pool.view(np.uint8)[: pool.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)


def differing(got: Array, expected: Array, tolerance: float) -> int:
    """Count the elements in which two arrays differ: in any bit, or by more than a tolerance."""
    if got.size != expected.size:
        raise BufferSpecError("result", expected=f"{expected.size} elements", got=str(got.size), remedy="")
    if tolerance == 0 and got.dtype == expected.dtype:
        unsigned = f"u{got.dtype.itemsize}"
        return int(np.count_nonzero(got.view(unsigned) != expected.view(unsigned)))
    wide = np.float64 if expected.dtype == np.float64 else np.float32
    with np.errstate(invalid="ignore", over="ignore"):
        return int(np.count_nonzero(~(np.abs(got.astype(wide) - expected.astype(wide)) <= tolerance)))
