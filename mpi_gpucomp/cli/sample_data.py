"""The values that codecs are measured with: those of a `.npy` file, or weights like a network's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.device import dtype_of_name
from mpi_gpucomp.device.buffer import numpy_dtype
from mpi_gpucomp.errors import BufferSpecError, GpucompError, SpecError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpi_gpucomp.device import DType

__all__ = ["Values", "largest_error", "like_weights", "read"]

DEVIATION = 0.02
GENERATED_BYTES = 4 << 20
GENERATED = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Values:
    """Elements one behind the other, in numpy's type of the same bits: bfloat16, which it does not have, is uint16."""

    array: NDArray[Any]
    dtype: DType
    origin: str

    def __str__(self) -> str:
        """Say what they are."""
        return f"{self.origin}: {self.array.size} x {self.dtype}"


def like_weights(name: str | None = None) -> Values:
    """Draw the same normally distributed values every time, of the named type (float32)."""
    dtype = dtype_of_name(name or "float32")
    if dtype is None or dtype.name not in GENERATED:
        raise SpecError(
            "option --dtype",
            expected=f"one of {', '.join(GENERATED)} where there is no file",
            got=str(name),
            remedy="Name a .npy file with values of this type: --measure FILE.",
        )
    drawn = np.random.default_rng(0).normal(0, DEVIATION, GENERATED_BYTES // dtype.itemsize)
    array = _rounded_to_bfloat16(drawn) if dtype.name == "bfloat16" else drawn.astype(dtype.name)
    return Values(array, dtype, f"normal(0, {DEVIATION})")


def _rounded_to_bfloat16(drawn: NDArray[np.float64]) -> NDArray[np.uint16]:
    bits = drawn.astype(np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


def read(path: Path, name: str | None = None) -> Values:
    """Read a `.npy` file of any shape; `name` says what its elements are where the file does not."""
    array = _load(path)
    if array.size == 0:
        raise _unfit(path, "at least one element", f"shape {array.shape}", "Choose a file with values.")
    array = array.ravel(order="K")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if name is None and array.dtype == np.dtype("V2"):
        name = "bfloat16"  # numpy writes it as two bytes without a meaning
    return Values(*_typed(array, name, path), origin=path.name)


def _load(path: Path) -> NDArray[Any]:
    remedy = "Write one with numpy.save; an array of objects cannot be used."
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        got = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _unfit(path, "a .npy file", got.partition("\n")[0].rstrip("."), remedy) from error
    if isinstance(array, np.ndarray):
        return array
    array.close()
    raise _unfit(path, "a .npy file with one array", "an archive of several", remedy)


def _typed(array: NDArray[Any], name: str | None, path: Path) -> tuple[NDArray[Any], DType]:
    if name is None:
        try:
            return array, numpy_dtype(array.dtype)
        except BufferSpecError as error:
            remedy = "Convert the array, or say with --dtype what its elements are."
            raise _unfit(path, error.expected, error.got, remedy) from error
    dtype = dtype_of_name(name)
    if dtype is None or dtype.itemsize != array.dtype.itemsize:
        size = array.dtype.itemsize
        remedy = "--dtype names the elements as they lie in the file; it converts nothing."
        raise _unfit(path, f"a type of {size} bytes, as its {array.dtype} has", name, remedy)
    return array.view("uint16" if name == "bfloat16" else name), dtype


def _unfit(path: Path, expected: str, got: str, remedy: str) -> GpucompError:
    return BufferSpecError(f"file {path}", expected=expected, got=got, remedy=remedy)


def largest_error(plain: NDArray[Any], decoded: NDArray[Any], dtype: DType) -> tuple[float, float]:
    """Return the largest difference, absolute and as a share of the range of the plain values.

    What was NaN or infinite and no longer is, or the reverse, is infinitely wrong.
    """
    if plain.tobytes() == decoded.tobytes():
        return 0.0, 0.0
    before, after = _widened(plain, dtype), _widened(decoded, dtype)
    with np.errstate(all="ignore"):
        same = (before == after) | (np.isnan(before) & np.isnan(after))
        worst = float(np.nan_to_num(np.where(same, 0, abs(after - before)), nan=np.inf, posinf=np.inf).max())
        finite = before[np.isfinite(before)]
        span = float(np.ptp(finite)) if finite.size and before.dtype.kind == "f" else 0.0
    return worst, worst / span if span else worst and np.inf


def _widened(array: NDArray[Any], dtype: DType) -> NDArray[Any]:
    if dtype.name == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.complex128 if dtype.kind == "c" else np.float64)
