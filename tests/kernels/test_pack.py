"""The pack kernels: strided arrays and buckets of many tensors, packed and unpacked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import address

from mpi_gpucomp.device.buffer import coalesce_dimensions

if TYPE_CHECKING:
    from collections.abc import Callable

    from machines import Machine

TILE = 1024
ELEMENTS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}

VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "contiguous": lambda x: x,
    "every second": lambda x: x[::2],
    "backwards": lambda x: x[::-1],
    "one element": lambda x: x[5:6],
    "none": lambda x: x[:0],
    "transposed": lambda x: x[:4096].reshape(64, 64).T,
    "columns": lambda x: x[:4096].reshape(64, 64)[:, 3:40],
    "columns backwards": lambda x: x[:4096].reshape(64, 64)[::-1, ::-1][:, 1:],
    "rows of 3": lambda x: x[:4096].reshape(-1, 4)[:, :3],
    "rows of 7": lambda x: x[:4096].reshape(-1, 8)[:, 1:],
    "rows of 9": lambda x: x[:4090].reshape(-1, 10)[:, 1:],
    "rows of 1500": lambda x: x[:4800].reshape(3, 1600)[:, :1500],
    "short rows in planes": lambda x: x[:4800].reshape(100, 6, 8)[:, ::-2, 2:5],
    "permuted": lambda x: x[:4800].reshape(10, 6, 8, 10).transpose(2, 0, 3, 1),
    "12 dimensions": lambda x: x[:4096].reshape((2,) * 12).transpose(range(11, -1, -1)),
}


def numbered(machine: Machine, size: int, count: int = 5000) -> np.ndarray:
    """Return elements of `size` bytes, distinct if `size` allows."""
    return machine.copy(np.random.default_rng(size).integers(0, 256, count * size, np.uint8)).view(ELEMENTS[size])


def run(machine: Machine, way: str, array: np.ndarray, contiguous: np.ndarray, calls: int = 1) -> None:
    shape, strides = coalesce_dimensions(array.shape, array.strides, array.itemsize)
    layout = machine.copy(shape, np.int64), machine.copy(strides, np.int64)
    kernel, tiles = f"pack_{way}_{array.itemsize}", -(-array.size // TILE)
    machine.launch(kernel, tiles, array, contiguous, array.size, len(shape), *layout, calls=calls)


def gathered(machine: Machine, array: np.ndarray, calls: int = 1) -> bytes:
    contiguous = machine.zeros(array.size + 1, array.dtype)
    run(machine, "gather", array, contiguous, calls)
    assert not any(contiguous[-1:].tobytes())
    return contiguous[:-1].tobytes()


def check_scatter(machine: Machine, base: np.ndarray, view: Callable[[np.ndarray], np.ndarray], calls: int = 1) -> None:
    """Scatter new values to a view, and compare with numpy's assignment."""
    fresh = machine.copy(numbered(machine, base.itemsize, view(base).size)[::-1])
    wanted = base.copy()
    view(wanted)[...] = fresh.reshape(view(base).shape)
    run(machine, "scatter", view(base), fresh, calls)
    assert base.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("size", ELEMENTS)
@pytest.mark.parametrize("name", VIEWS)
def test_gather_equals_numpy(machine: Machine, name: str, size: int) -> None:
    array = VIEWS[name](numbered(machine, size))
    assert gathered(machine, array) == array.tobytes()


@pytest.mark.parametrize("size", ELEMENTS)
@pytest.mark.parametrize("name", VIEWS)
def test_scatter_equals_numpy(machine: Machine, name: str, size: int) -> None:
    check_scatter(machine, numbered(machine, size), VIEWS[name])


@pytest.mark.parametrize("name", VIEWS)
def test_split_ranges_give_the_same_result(machine: Machine, name: str) -> None:
    base = numbered(machine, 4)
    assert gathered(machine, VIEWS[name](base), calls=3) == VIEWS[name](base).tobytes()
    check_scatter(machine, base, VIEWS[name], calls=3)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["contiguous", "every second", "transposed", "rows of 3"])
def test_elements_need_no_alignment_on_the_host(machine: Machine, name: str, size: int) -> None:
    if machine.name == "cuda":
        pytest.skip("a GPU's elements are aligned")
    shifted = machine.zeros(5000 * size + 1, np.uint8)[1:].view(ELEMENTS[size])
    shifted[...] = numbered(machine, size)
    assert gathered(machine, VIEWS[name](shifted)) == VIEWS[name](shifted).tobytes()
    check_scatter(machine, shifted, VIEWS[name])


@st.composite
def views(draw: st.DrawFn) -> Callable[[np.ndarray], np.ndarray]:
    lengths = st.integers(1, 5) | st.integers(6, 40)
    shape: list[int] = []
    while len(shape) < 5 and (length := draw(lengths)) * int(np.prod(shape)) <= 5000:
        shape.append(length)
    steps = st.builds(slice, st.none() | st.integers(0, 3), st.none(), st.sampled_from([None, 1, 2, 3]))
    steps |= st.builds(slice, st.none(), st.none(), st.sampled_from([-1, -2]))
    index: Any = (*(draw(steps) for _ in shape), ...)
    order = draw(st.permutations(range(len(shape))))
    return lambda x: x[: int(np.prod(shape))].reshape(shape)[index].transpose(order)


@given(view=views(), size=st.sampled_from(list(ELEMENTS)))
def test_any_view(machine: Machine, view: Callable[[np.ndarray], np.ndarray], size: int) -> None:
    base = numbered(machine, size)
    assert gathered(machine, view(base)) == view(base).tobytes()
    check_scatter(machine, base, view)


def tensors_and_pieces(machine: Machine, lengths: list[int]) -> tuple[list[np.ndarray], np.ndarray, int]:
    """Return tensors, the table of their offsets in a bucket, and the bucket's length."""
    random = np.random.default_rng(0)
    tensors = [machine.copy(random.integers(1, 256, length, np.uint8)) for length in lengths]
    gaps = np.arange(len(lengths)) % 5
    offsets = np.cumsum([0, *(np.array(lengths, int) + gaps)])
    table = [(address(t), offset, t.size) for t, offset in zip(tensors, offsets, strict=False)]
    return tensors, machine.copy(np.array(table, np.uint64).reshape(-1, 3)), int(offsets[-1])


BUCKETS = {"none": [], "one": [100], "many": [1, 0, 31, 32, 33, 16, 64, 4096, 5, 1000] * 7}


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("name", BUCKETS)
def test_a_bucket_packs_and_unpacks_tensors(machine: Machine, name: str, calls: int) -> None:
    tensors, pieces, length = tensors_and_pieces(machine, BUCKETS[name])
    bucket, wanted = machine.zeros(length, np.uint8), np.zeros(length, np.uint8)
    for tensor, (_, offset, nbytes) in zip(tensors, pieces.tolist(), strict=True):
        wanted[offset : offset + nbytes] = tensor
    machine.launch("pack_bucket", len(tensors), pieces, len(tensors), bucket, 0, calls=calls)
    assert bucket.tobytes() == wanted.tobytes()

    before = [tensor.tobytes() for tensor in tensors]
    for tensor in tensors:
        tensor.fill(0)
    machine.launch("pack_bucket", len(tensors), pieces, len(tensors), bucket, 1, calls=calls)
    assert [tensor.tobytes() for tensor in tensors] == before
