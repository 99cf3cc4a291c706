"""Buffer arguments of every kind, filled with given values, with access to their elements and the memory around them.

A kind is a function that takes the values, one array for each block, and returns a `Held`.
"""

from __future__ import annotations

import array
import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

try:
    import torch
except ImportError:
    torch = None

cupy: Any = None
if "MPI_GPUCOMP_SIMULATED_CUDA" in os.environ or Path("/proc/driver/nvidia").exists():
    import cupy

Values = Sequence[np.ndarray]
"""One array for each block."""
GAP = 0xA5
"""The value of every byte outside the elements."""


class Held(NamedTuple):
    """A buffer argument of mpi4py; `read` returns its elements, `intact` checks the memory around them."""

    spec: Any
    read: Callable[[], np.ndarray]
    intact: Callable[[], bool] = lambda: True


Kind = Callable[[Values], Held]


def datatype(dtype: np.dtype) -> MPI.Datatype:
    return MPI.Datatype.fromcode(dtype.char)


def empty(count: int, dtype: np.dtype) -> np.ndarray:
    """Return memory filled with GAP."""
    return np.frombuffer(bytearray([GAP]) * (count * dtype.itemsize), dtype).copy()


def within(base: np.ndarray, places: Any, values: np.ndarray) -> tuple[Callable[[], np.ndarray], Callable[[], bool]]:
    """Store values at some places of a base; return `read` and `intact` for them."""
    base[places] = values.reshape(base[places].shape)

    def intact() -> bool:
        raw = np.dtype(f"V{base.itemsize}")  # compare bytes, not values
        around = base.view(raw).copy()
        around[places] = empty(1, raw)[0]
        return around.tobytes() == empty(base.size, raw).tobytes()

    return lambda: base[places].ravel(), intact


def joined(values: Values) -> np.ndarray:
    return np.concatenate(values)


# Contiguous and strided memory


def contiguous(values: Values) -> Held:
    whole = joined(values)
    return Held(whole, lambda: whole)


def matrix(values: Values) -> Held:
    """Hold them in two dimensions, in Fortran order."""
    whole = joined(values)
    shape = (2, whole.size // 2) if whole.size % 2 == 0 else (1, whole.size)
    table = whole.reshape(shape, order="F").copy(order="F")
    return Held(table, lambda: table.ravel(order="F"))


def strided(values: Values) -> Held:
    whole = joined(values)
    base, places = empty(3 * whole.size + 2, whole.dtype), slice(1, 1 + 3 * whole.size, 3)
    return Held(base[places], *within(base, places, whole))


def columns(values: Values) -> Held:
    """Hold them in some columns of a table."""
    whole = joined(values)
    rows = 3 if whole.size % 3 == 0 else 1
    base, places = empty(rows * (whole.size // rows + 4), whole.dtype), (slice(None), slice(2, -2))
    base = base.reshape(rows, -1)
    return Held(base[places], *within(base, places, whole))


def typed(values: Values) -> Held:
    whole = joined(values)
    return Held([whole, datatype(whole.dtype)], lambda: whole)


def counted(values: Values) -> Held:
    """Hold them at the start of something longer."""
    whole = joined(values)
    base, places = empty(whole.size + 5, whole.dtype), slice(0, whole.size)
    return Held((base, len(values[0]), datatype(whole.dtype)), *within(base, places, whole))


def displaced(values: Values) -> Held:
    """Hold them in the middle of something longer."""
    whole = joined(values)
    base, places = empty(whole.size + 5, whole.dtype), slice(3, 3 + whole.size)
    return Held([base, (len(values[0]), 3), whole.dtype.char], *within(base, places, whole))


def displaced_in_gaps(values: Values) -> Held:
    whole = joined(values)
    base = empty(2 * (whole.size + 5), whole.dtype)
    spec = [base[::2], len(values[0]), 3, datatype(whole.dtype)]
    return Held(spec, *within(base, slice(6, 6 + 2 * whole.size, 2), whole))


def byte_array(values: Values) -> Held:
    whole = joined(values)
    raw = bytearray(whole.tobytes())
    return Held([raw, datatype(whole.dtype)], lambda: np.frombuffer(raw, whole.dtype))


def memory_view(values: Values) -> Held:
    whole = joined(values)
    return Held(memoryview(whole), lambda: whole)


def python_array(values: Values) -> Held:
    whole = joined(values)
    own = array.array(whole.dtype.char, whole.tobytes())
    return Held(own, lambda: np.frombuffer(own, whole.dtype))


def unaligned(values: Values) -> Held:
    """Hold them at an odd address."""
    whole = joined(values)
    raw = bytearray([GAP]) * (whole.nbytes + 2)
    inside = np.frombuffer(raw, whole.dtype, whole.size, 1)
    inside[...] = whole
    return Held([inside, datatype(whole.dtype)], inside.copy, lambda: raw[0] == raw[-1] == GAP)


def tensor(values: Values) -> Held:
    whole = joined(values)
    return Held(torch.from_numpy(whole), lambda: whole)


def typed_tensor(values: Values) -> Held:
    whole = joined(values)
    return Held([torch.from_numpy(whole), datatype(whole.dtype)], lambda: whole)


def strided_tensor(values: Values) -> Held:
    whole = joined(values)
    base = empty(2 * whole.size + 1, whole.dtype)
    places = slice(0, 2 * whole.size, 2)
    return Held(torch.from_numpy(base)[places], *within(base, places, whole))


# GPU memory


def on_gpu(values: Values) -> Held:
    whole = cupy.asarray(joined(values))
    return Held(whole, lambda: cupy.asnumpy(whole))


def typed_on_gpu(values: Values) -> Held:
    whole = cupy.asarray(joined(values))
    return Held([whole, datatype(whole.dtype)], lambda: cupy.asnumpy(whole))


def strided_on_gpu(values: Values) -> Held:
    whole = joined(values)
    base, places = empty(3 * whole.size + 2, whole.dtype), slice(1, 1 + 3 * whole.size, 3)
    within(base, places, whole)
    there = cupy.asarray(base)

    def intact() -> bool:
        return within(cupy.asnumpy(there), places, whole)[1]()

    return Held(there[places], lambda: cupy.asnumpy(there)[places], intact)


def scattered_on_gpu(values: Values) -> Held:
    memory, counts, starts, _, _ = placed(values)
    there = cupy.asarray(memory)
    places = np.concatenate([np.arange(at, at + count) for at, count in zip(starts, counts, strict=True)]).astype(int)
    return Held([there, counts, starts, datatype(memory.dtype)], lambda: cupy.asnumpy(there)[places])


# To send only


def read_only(values: Values) -> Held:
    whole = joined(values)
    whole.flags.writeable = False
    return Held(whole, lambda: whole)


def unchanging_bytes(values: Values) -> Held:
    whole = joined(values)
    return Held([whole.tobytes(), datatype(whole.dtype)], lambda: whole)


def backwards(values: Values) -> Held:
    whole = joined(values)
    return Held(whole[::-1].copy()[::-1], lambda: whole)


# Blocks of different lengths


def vector(values: Values) -> Held:
    whole = joined(values)
    return Held([whole, [len(block) for block in values], datatype(whole.dtype)], lambda: whole)


def placed(values: Values, *, step: int = 1, gap: int = 2) -> tuple[np.ndarray, list[int], list[int], Any, Any]:
    """Hold the blocks in another order, with gaps; return what a vector argument takes, and `read` and `intact`."""
    counts = [len(block) for block in values]
    order = sorted(range(len(values)), key=lambda number: (number * 2 + 1) % len(values))
    ends = list(accumulate((counts[number] + gap for number in order), initial=gap))
    starts = [ends[order.index(number)] for number in range(len(values))]
    whole = joined(values)
    base = empty(step * ends[-1], whole.dtype)
    places = np.concatenate([np.arange(at, at + count) for at, count in zip(starts, counts, strict=True)]) * step
    return base[::step], counts, starts, *within(base, places.astype(int), whole)


def scattered(values: Values) -> Held:
    memory, counts, starts, read, intact = placed(values)
    return Held([memory, counts, starts, datatype(memory.dtype)], read, intact)


def scattered_pair(values: Values) -> Held:
    memory, counts, starts, read, intact = placed(values, gap=0)
    return Held((memory, (np.array(counts), tuple(starts))), read, intact)


def scattered_in_gaps(values: Values) -> Held:
    memory, counts, starts, read, intact = placed(values, step=2)
    return Held([memory, counts, starts, memory.dtype.char], read, intact)


def scattered_tensor(values: Values) -> Held:
    memory, counts, starts, read, intact = placed(values)
    return Held([torch.from_numpy(memory), counts, starts, None], read, intact)


HERE = [
    contiguous,
    matrix,
    strided,
    columns,
    typed,
    counted,
    displaced,
    displaced_in_gaps,
    byte_array,
    memory_view,
    unaligned,
]
TENSORS = [tensor, typed_tensor, strided_tensor] if torch else []
GPU = [on_gpu, typed_on_gpu, strided_on_gpu]
RECEIVING: list[Kind] = HERE + TENSORS + (3 * GPU if cupy else [])
SENDING: list[Kind] = [*RECEIVING, read_only, unchanging_bytes, backwards]
VECTORS: list[Kind] = [vector, scattered, scattered_pair, scattered_in_gaps] + ([scattered_tensor] if torch else [])
VECTORS += [scattered_on_gpu] * 3 if cupy else []
