"""Buffer arguments are read as mpi4py reads them; every case is compared with mpi4py.

In a graph in which one rank is its own neighbour n times, mpi4py reads arguments for n ranks in one process.
"""

from __future__ import annotations

import array
import builtins
import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from mpi4py.util.dtlib import to_numpy_dtype

from mpi_gpucomp._call.buffers import UnsupportedError, read_blocks, read_vector
from mpi_gpucomp.device import Device
from mpi_gpucomp.errors import BufferSpecError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi_gpucomp.engine.program import Blocks

ROOM = 512
"""Bytes of a block that is long enough for every argument here."""

Form = Callable[[np.ndarray], Any]
WHERE: dict[str, Any] = {"topic": "Allgather, received", "rank": 3}


@pytest.fixture(scope="module")
def neighbours() -> Iterator[Callable[[int], MPI.Distgraphcomm]]:
    made: dict[int, MPI.Distgraphcomm] = {}

    def graph(ranks: int) -> MPI.Distgraphcomm:
        if ranks not in made:
            made[ranks] = MPI.COMM_SELF.Create_dist_graph_adjacent([0] * ranks, [0] * ranks)
        return made[ranks]

    yield graph
    for comm in made.values():
        comm.Free()


def read(spec: Any, ranks: int | None, *, writable: bool = False) -> Blocks:
    """Read an argument of a v-variant for `ranks` ranks, or one of equal blocks (None)."""
    if ranks is None:
        return read_blocks(spec, writable=writable, **WHERE)
    return read_vector(spec, ranks, writable=writable, **WHERE)


def numbered(dtype: Any = np.float64, nbytes: int = 240) -> np.ndarray:
    """Return memory in which no byte occurs twice, and none is 0."""
    return np.arange(1, nbytes + 1, dtype=np.uint8).view(dtype)


def spans(blocks: Blocks, memory: np.ndarray) -> list[slice]:
    """Return the bytes of `memory` that the blocks cover."""
    assert blocks.buffer.address == memory.ctypes.data or not blocks.buffer.count
    size = blocks.buffer.dtype.itemsize
    return [slice(a * size, (a + n) * size) for a, n in zip(blocks.starts, blocks.counts, strict=True)]


def copied(form: Form, ours: Callable[..., Blocks], ranks: int, dtype: Any) -> bytes:
    """Copy the blocks that an argument selects to the same places of empty memory, and return that."""
    memory, into = numbered(dtype), np.zeros_like(numbered(dtype))
    sent, received = ours(form(memory), writable=False), ours(form(into), writable=True)
    assert len(sent.counts) == len(received.counts) == ranks
    for source, to in zip(spans(sent, memory), spans(received, into), strict=True):
        into.view(np.uint8)[to] = memory.view(np.uint8)[source]
    return into.tobytes()


def check_equal_blocks(comm: MPI.Distgraphcomm, form: Form, ranks: int) -> None:
    """Compare with the elements that mpi4py moves when sender and receiver pass the same argument."""

    def ours(spec: Any, writable: bool) -> Blocks:
        return read_blocks(spec, blocks=ranks, writable=writable, **WHERE)

    memory, into = numbered(), np.zeros_like(numbered())
    comm.Neighbor_alltoall(form(memory), form(into))
    assert copied(form, ours, ranks, np.float64) == into.tobytes()
    blocks = ours(form(memory), writable=False)
    assert len(set(blocks.counts)) == 1  # with equal counts, equal memory means equal blocks
    assert [start - blocks.starts[0] for start in blocks.starts] == [k * blocks.counts[0] for k in range(ranks)]


def check_vector(comm: MPI.Distgraphcomm, form: Form, ranks: int, dtype: Any = np.float64) -> None:
    """Compare with the elements that mpi4py sends to each rank, and with where it writes those it receives."""
    memory, into, got = numbered(dtype), np.zeros_like(numbered(dtype)), np.zeros((ranks, ROOM), np.uint8)
    comm.Neighbor_alltoallv(form(memory), [got, ROOM, MPI.BYTE])
    expected = [row.tobytes().rstrip(b"\0") for row in got]
    blocks = read(form(memory), ranks)
    assert [memory.view(np.uint8)[span].tobytes() for span in spans(blocks, memory)] == expected

    lengths = [len(part) for part in expected]
    comm.Neighbor_alltoallv([np.full(sum(lengths), 255, np.uint8), lengths, MPI.BYTE], form(into))
    mine = np.zeros_like(into)
    received = read(form(mine), ranks, writable=True)
    for span in spans(received, mine):
        mine.view(np.uint8)[span] = 255
    assert mine.tobytes() == into.tobytes()


PLAIN = {
    "data": lambda a: a,
    "none": lambda a: [a, None],
    "nones": lambda a: [a, None, None],
    "all nones": lambda a: (a, None, None, None),
    "count": lambda a: [a, 3],
    "count of numpy": lambda a: [a, np.int32(3)],
    "count in an array": lambda a: [a, np.array(3)],
    "count of bool": lambda a: [a, True],
    "no elements": lambda a: [a, 0],
    "tuple": lambda a: (a, 3),
    "count, no type": lambda a: [a, 3, None],
    "pair": lambda a: [a, (3, 2)],
    "pair as a list": lambda a: [a, [3, 2]],
    "pair, type": lambda a: [a, (3, 2), MPI.DOUBLE],
    "pair with no count": lambda a: [a, (None, 6)],
    "four": lambda a: [a, 3, 2, MPI.DOUBLE],
    "four, no type": lambda a: [a, 3, 2, None],
    "four, no count": lambda a: [a, None, 6, None],
    "nothing at the end": lambda a: [a, 0, a.size, "d"],
    "the rest of none": lambda a: [a, None, a.size, None],
    "type": lambda a: [a, MPI.DOUBLE],
    "character": lambda a: [a, "d"],
    "code": lambda a: (a, 2, "f8"),
    "other type": lambda a: [a, MPI.FLOAT],
    "bytes": lambda a: [a, MPI.BYTE],
    "bytes from": lambda a: [a, 5, 7, MPI.BYTE],
    "wider type": lambda a: [a, 2, 1, MPI.C_DOUBLE_COMPLEX],
    "characters": lambda a: [a, 9, "c"],
    "bytes that leave some": lambda a: [a.view(np.uint8)[:-3], 2, MPI.INT],
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("form", PLAIN.values(), ids=PLAIN.keys())
def test_equal_blocks_select_the_elements_that_mpi4py_moves(neighbours: Any, form: Any, ranks: int) -> None:
    check_equal_blocks(neighbours(ranks), form, ranks)


@pytest.mark.parametrize("form", PLAIN.values(), ids=PLAIN.keys())
def test_arguments_between_two_ranks(form: Any) -> None:
    memory, got, status = numbered(), np.zeros(ROOM, np.uint8), MPI.Status()
    MPI.COMM_SELF.Sendrecv(form(memory), 0, 0, [got, MPI.BYTE], 0, 0, status)
    blocks = read(form(memory), None)
    (span,) = spans(blocks, memory)
    assert memory.view(np.uint8)[span].tobytes() == got[: status.Get_count(MPI.BYTE)].tobytes()


VECTORS = {
    "data": lambda a: a,
    "none": lambda a: [a, None],
    "type": lambda a: [a, "d"],
    "other type": lambda a: (a, MPI.SHORT),
    "one count": lambda a: [a, 4],
    "one count in an array": lambda a: [a, np.array(4)],
    "counts": lambda a: [a, [4, 0, 3]],
    "counts, no type": lambda a: [a, [4, 0, 3], None],
    "counts of numpy": lambda a: [a, np.array([4, 0, 3]), MPI.DOUBLE],
    "one count of torch": lambda a: [a, torch.tensor([4]), MPI.DOUBLE],
    "counts in a range": lambda a: [a, range(3)],
    "pair": lambda a: [a, ([4, 0, 3], [9, 1, 2])],
    "pair of tuples": lambda a: [a, ((4, 0, 3), (9, 1, 2)), "d"],
    "pair of numbers": lambda a: [a, (2, 5)],
    "pair, no counts": lambda a: [a, (None, [20, 10, 0])],
    "pair, no displacements": lambda a: [a, ([4, 0, 3], None), None],
    "four": lambda a: [a, [4, 1, 3], [9, 1, 2], MPI.DOUBLE],
    "four with tuples": lambda a: (a, (4, 1, 3), (9, 1, 2), "d"),
    "four, no type": lambda a: [a, 3, 7, None],
    "four, no counts": lambda a: [a, None, [20, 0, 10], None],
    "bytes": lambda a: [a, [40, 1, 3], [50, 11, 4], MPI.BYTE],
    "nothing far away": lambda a: [a, [2, 0, 1], [0, 999, 3], "d"],
    "nothing far before": lambda a: [a, [2, 0, 1], [0, -5, 3], "d"],
    "no elements": lambda a: [a, 0],
}


@pytest.mark.parametrize("form", VECTORS.values(), ids=VECTORS.keys())
def test_vectors_select_the_elements_that_mpi4py_moves(neighbours: Any, form: Any) -> None:
    check_vector(neighbours(3), form, 3)


@pytest.mark.parametrize("length", range(8))
def test_a_vector_without_counts_is_divided_as_in_mpi4py(neighbours: Any, length: int) -> None:
    check_vector(neighbours(3), lambda memory: memory[:length], 3, np.int16)


@settings(max_examples=100)
@given(data=st.data())
def test_any_counts_and_displacements(neighbours: Any, data: st.DataObject) -> None:
    ranks, dtype = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([np.uint8, np.int16, np.float64]))
    total = 240 // np.dtype(dtype).itemsize
    counts = data.draw(st.lists(st.integers(0, total), min_size=ranks, max_size=ranks))
    starts = [data.draw(st.integers(0, total - count)) for count in counts]
    layout = data.draw(st.sampled_from(["pair", "four"]))

    def form(memory: np.ndarray) -> Any:
        return [memory, (counts, starts)] if layout == "pair" else (memory, counts, starts, None)

    check_vector(neighbours(ranks), form, ranks, dtype)


@settings(max_examples=100)
@given(data=st.data())
def test_any_count_and_displacement(neighbours: Any, data: st.DataObject) -> None:
    ranks, code = data.draw(st.integers(1, 4)), data.draw(st.sampled_from(["B", "h", "f", "d", "D"]))
    total = 240 // MPI.Datatype.fromcode(code).size
    start = data.draw(st.integers(0, total))
    count = data.draw(st.integers(0, (total - start) // ranks))

    check_equal_blocks(neighbours(ranks), lambda memory: [memory, count, start, code], ranks)


@settings(max_examples=100)
@given(st.integers(1, 4), st.integers(0, 30), st.none() | st.integers(-2, 32), st.none() | st.integers(-2, 32))
def test_arguments_that_mpi4py_rejects_are_rejected(
    neighbours: Any, ranks: int, length: int, count: int | None, displacement: int | None
) -> None:
    spec = [np.zeros(length), count, displacement, None]
    refused = False
    if count is None or count <= 0 or (displacement or 0) + count * ranks <= length:
        try:
            neighbours(ranks).Neighbor_alltoall(spec, [np.zeros(length), count, displacement, None])
        except ValueError:
            refused = True
    else:  # mpi4py would read and write past the end
        refused = True
    try:
        read_blocks(spec, blocks=ranks, writable=True, **WHERE)
    except BufferSpecError:
        assert refused
    else:
        assert not refused


PAIRS = ["FLOAT_INT", "DOUBLE_INT", "LONG_INT", "INT_INT", "TWOINT", "SHORT_INT", "LONG_DOUBLE_INT"]
WIDE = ["LONG_DOUBLE", "REAL16", "COMPLEX32", "C_LONG_DOUBLE_COMPLEX", "CXX_LONG_DOUBLE_COMPLEX"]
CHARACTERS = {"CHAR": "uint8", "CHARACTER": "uint8", "WCHAR": "uint32"}
DATATYPES = {name: datatype for name, datatype in vars(MPI).items() if isinstance(datatype, MPI.Datatype)}


@pytest.mark.parametrize("name", DATATYPES)
def test_every_datatype_has_its_numpy_type(name: str) -> None:
    datatype = DATATYPES[name]
    spec = [np.zeros(4, np.complex128), 1, datatype]
    if datatype == MPI.DATATYPE_NULL or name in (*PAIRS, *WIDE, "PACKED"):
        with pytest.raises(UnsupportedError):
            read_blocks(spec, writable=True, **WHERE)
    else:
        found = read_blocks(spec, writable=True, **WHERE).buffer.dtype.name
        assert found == (CHARACTERS.get(name) or to_numpy_dtype(datatype).name)


@pytest.mark.parametrize("code", sorted(MPI._typedict))
def test_every_type_code_has_the_datatype_of_mpi4py(code: str) -> None:
    def dtype_of(datatype: Any) -> str:
        try:
            return read_blocks([np.zeros(8, np.complex128), 1, datatype], writable=True, **WHERE).buffer.dtype.name
        except UnsupportedError as reason:
            return str(reason)

    assert dtype_of(code) == dtype_of(MPI.Datatype.fromcode(code))


DATA = {
    "bytearray": (lambda: bytearray(24), "uint8", 24),
    "array": (lambda: array.array("f", [0] * 6), "float32", 6),
    "memoryview": (lambda: memoryview(bytearray(24)).cast("i"), "int32", 6),
    "ctypes": (lambda: (ctypes.c_double * 3)(), "float64", 3),
    "mpi4py": (lambda: MPI.memory.allocate(24), "uint8", 24),
    "torch": (lambda: torch.zeros(2, 3), "float32", 6),
    "torch.bfloat16": (lambda: torch.zeros(12, dtype=torch.bfloat16), "bfloat16", 12),
    "ml_dtypes.bfloat16": (lambda: np.zeros(12, ml_dtypes.bfloat16), "bfloat16", 12),
    "numpy.float16": (lambda: np.zeros(12, np.float16), "float16", 12),
    "two dimensions": (lambda: np.zeros((2, 3), np.float32), "float32", 6),
    "Fortran's order": (lambda: np.zeros((2, 3), np.float32).T, "float32", 6),
    "a scalar": (lambda: np.zeros((), np.complex128), "complex128", 1),
}


@pytest.mark.parametrize("make, name, count", DATA.values(), ids=DATA.keys())
def test_every_kind_of_buffer_object(make: Any, name: str, count: int) -> None:
    data = make()
    whole = read_blocks(data, writable=True, **WHERE)
    assert (whole.buffer.dtype.name, list(whole.starts), list(whole.counts)) == (name, [0], [count])
    halves = read_vector([data, MPI.BYTE], 2, writable=True, **WHERE)
    nbytes = count * whole.buffer.dtype.itemsize
    assert (halves.buffer.dtype.name, halves.buffer.nbytes, halves.buffer.address) == (
        "uint8",
        nbytes,
        whole.buffer.address,
    )
    assert (list(halves.starts), list(halves.counts)) == ([0, nbytes // 2], [nbytes // 2] * 2)
    assert halves.buffer.address == whole.buffer.address


def test_strided_arrays_keep_their_strides() -> None:
    values = np.zeros((6, 8), np.float32)
    for spec in (values[:, ::2], [values[:, ::2], MPI.FLOAT], [values[:, ::2], "f"]):
        blocks = read_blocks(spec, blocks=3, writable=True, **WHERE)
        assert (blocks.buffer.strides, list(blocks.starts), list(blocks.counts)) == ((32, 8), [0, 8, 16], [8] * 3)
    seen = read_blocks([values[:, ::2], 5, 2, MPI.INT], writable=True, **WHERE)
    assert (seen.buffer.dtype.name, seen.buffer.shape, seen.buffer.strides) == ("int32", (6, 4), (32, 8))
    assert (list(seen.starts), list(seen.counts)) == ([2], [5])


def test_read_only_memory_may_be_sent() -> None:
    for data in (b"abcdefgh", np.frombuffer(b"abcdefgh", np.uint8)):
        blocks = read_blocks([data, 2, 1, "i2"], writable=False, **WHERE)
        assert (blocks.buffer.readonly, list(blocks.starts), list(blocks.counts)) == (True, [1], [2])


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_rank_without_elements_may_pass_what_mpi4py_allows(neighbours: Any, ranks: int | None) -> None:
    for spec in ([None, "d"], [None, 0, MPI.DOUBLE], (None, None, None, "f8")):
        blocks = read(spec, ranks, writable=True)
        assert (blocks.buffer.dtype.name, sum(blocks.counts), len(blocks.counts)) == ("float64", 0, ranks or 1)
        neighbours(2).Neighbor_alltoallv(spec, spec)


def test_a_gpu_buffer_keeps_its_device_and_stream(gpu: Device) -> None:
    cupy = pytest.importorskip("cupy")
    values = cupy.zeros(6, cupy.float64)
    plain = read_blocks(values, writable=True, **WHERE)
    seen = read_blocks([values, 4, 1, MPI.FLOAT], writable=True, **WHERE)
    assert (seen.buffer.device, seen.buffer.dtype.name, seen.buffer.count) == (gpu.name, "float32", 12)
    assert seen.buffer.producer_stream == plain.buffer.producer_stream


def derived() -> MPI.Datatype:
    return MPI.FLOAT.Create_vector(2, 1, 2).Commit()


LEFT = {
    "derived": lambda: [np.zeros(8, np.float32), 1, derived()],
    "contiguous": lambda: [np.zeros(8, np.float32), 1, MPI.FLOAT.Create_contiguous(4).Commit()],
    "pairs": lambda: [np.zeros(4, "f4,i4"), MPI.FLOAT_INT],
    "long double": lambda: np.zeros(3, np.longdouble),
    "long double, named": lambda: [np.zeros(3, np.longdouble), MPI.LONG_DOUBLE],
    "packed": lambda: [np.zeros(3, np.uint8), MPI.PACKED],
    "bottom": lambda: [MPI.BOTTOM, 0, "d"],
    "structured": lambda: [np.zeros(3, "f4,i4"), MPI.BYTE],
    "structured in Fortran's order": lambda: [np.zeros((3, 2), "f4,i4").T, MPI.BYTE],
    "of the other byte order": lambda: [np.zeros(3, ">f4"), "f"],
    "characters": lambda: np.zeros(3, "S1"),
    "times": lambda: [np.zeros(3, "M8[s]"), "M"],
    "masked": lambda: np.ma.masked_array([1.0, 2.0]),
    "at an odd address": lambda: [memoryview(bytearray(9))[1:], MPI.FLOAT],
    "an array at an odd address": lambda: [np.frombuffer(bytearray(9), np.float32, 2, 1), "f"],
}


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT.keys())
def test_buffers_that_are_passed_through_are_valid_for_mpi4py(make: Any) -> None:
    spec = make()
    for writable in (False, True):
        with pytest.raises(UnsupportedError):
            read_blocks(spec, writable=writable, **WHERE)
        with pytest.raises(UnsupportedError):
            read_vector(spec, 1, writable=writable, **WHERE)
    MPI.COMM_SELF.Sendrecv(spec, 0, 0, make(), 0, 0)
    if isinstance(spec, list) and isinstance(spec[-1], MPI.Datatype) and not spec[-1].is_predefined:
        spec[-1].Free()


def test_an_unaligned_array_is_passed_through() -> None:
    """mpi4py accepts it only with a datatype, as above: numpy's type code for unaligned memory is unknown to it."""
    with pytest.raises(UnsupportedError):
        read_blocks(np.frombuffer(bytearray(9), np.float32, 2, 1), writable=True, **WHERE)


def test_empty_blocks_are_within_the_buffer() -> None:
    blocks = read_vector([np.zeros(8), [2, 0, 0], [3, 999, -5], "d"], 3, writable=True, **WHERE)
    assert [blocks.buffer.slice(*block).count for block in zip(blocks.starts, blocks.counts, strict=True)] == [2, 0, 0]


def test_in_place_is_not_a_buffer() -> None:
    with pytest.raises(UnsupportedError):
        read_blocks(MPI.IN_PLACE, writable=True, **WHERE)
    with pytest.raises(UnsupportedError):
        read_vector(MPI.IN_PLACE, 2, writable=True, **WHERE)


A = np.zeros(8)
LOCKED = np.zeros(8)
LOCKED.flags.writeable = False
PARTS = "2 to 4 items: data, then count, displacement and datatype or some of them, got"
PARTS_REMEDY = "Pass the data alone, or for example [data, count, datatype]."
PAIR_REMEDY = "Pass (count, displacement); for a v-variant counts are a list, (counts, displacements) a tuple."
TYPE = "an MPI datatype, or a code for one such as 'd' or 'f8', got"
TYPE_REMEDY = "Pass for example MPI.DOUBLE, or leave it out for the data's own type."
NUMBER_REMEDY = "Pass an int or a numpy integer."
COUNT_REMEDY = "Pass a longer buffer, or the count of one block in elements of the datatype."
START_REMEDY = "Count it in elements of the datatype, from the start of the buffer."
START = "a displacement from 0 to the 8 elements of float64 that there are, got"
EACH_REMEDY = "Pass one for each rank, in order."
NOTHING = (
    "a buffer, or a list or tuple that begins with one, got None. "
    "Pass an array; where there is nothing to send or receive, [None, datatype]."
)
NO_BUFFER = "an array of numpy, CuPy or torch, or an object with DLPack, an array interface or a buffer, got"
NO_BUFFER_REMEDY = "Convert it to an array first, for example with numpy.asarray."
READ_ONLY = "a writable buffer, got a read-only {}. Pass a writable copy."
ROUND = "Pass a count, or a buffer whose length in bytes is a multiple."

WRONG = [
    (None, None, NOTHING),
    (None, 2, NOTHING),
    ([None, 0], None, NOTHING),
    (5, None, f"{NO_BUFFER} int. {NO_BUFFER_REMEDY}"),
    ("text", 2, f"{NO_BUFFER} str. {NO_BUFFER_REMEDY}"),
    ([[1.0, 2.0], 2], None, f"{NO_BUFFER} list. {NO_BUFFER_REMEDY}"),
    ([], None, f"{PARTS} a list of 0. {PARTS_REMEDY}"),
    ([A], None, f"{PARTS} a list of 1. {PARTS_REMEDY}"),
    ((A,), 2, f"{PARTS} a tuple of 1. {PARTS_REMEDY}"),
    ([A, 1, 1, "d", 1], None, f"{PARTS} a list of 5. {PARTS_REMEDY}"),
    ([A, (1,), "d"], None, f"a pair of count and displacement, got a tuple of 1. {PAIR_REMEDY}"),
    ([A, [1, 2, 3]], None, f"a pair of count and displacement, got a list of 3. {PAIR_REMEDY}"),
    ([A, (1, 2, 3)], 3, f"a pair of count and displacement, got a tuple of 3. {PAIR_REMEDY}"),
    ([A, "MPI.DOUBLE"], None, f"{TYPE} 'MPI.DOUBLE'. {TYPE_REMEDY}"),
    ([A, "<f8"], 2, f"{TYPE} '<f8'. {TYPE_REMEDY}"),
    ([A, 1, np.dtype("f8")], None, f"{TYPE} numpy.dtypes.Float64DType. {TYPE_REMEDY}"),
    ([A, 1, 2], None, f"{TYPE} int. {TYPE_REMEDY}"),
    ([A, 1.0], None, f"an integer as count, got float. {NUMBER_REMEDY}"),
    ([A, np.array([1])], None, f"an integer as count, got numpy.ndarray. {NUMBER_REMEDY}"),
    ([A, 1, 1.5, "d"], None, f"an integer as displacement, got float. {NUMBER_REMEDY}"),
    ([A, [1, 1.5]], 2, f"an integer as count, got float. {NUMBER_REMEDY}"),
    ([A, 1.5], 2, f"an integer as count, got float. {NUMBER_REMEDY}"),
    ([A, {1, 2}], 2, f"an integer as count, got set. {NUMBER_REMEDY}"),
    ([A, np.array(1.5)], 2, f"an integer as count, got numpy.ndarray. {NUMBER_REMEDY}"),
    ([A, np.array([[1, 1], [1, 1]])], 2, f"an integer as count, got numpy.ndarray. {NUMBER_REMEDY}"),
    ([A, 1, 1.5, "d"], 2, f"an integer as displacement, got float. {NUMBER_REMEDY}"),
    ([A, -1], None, "a count from 0 to 8, as 8 elements of float64 are there for 1 blocks, got -1. " + COUNT_REMEDY),
    ([A, 1, -1, "d"], None, f"{START} -1. {START_REMEDY}"),
    ([A, 0, 9, "d"], None, f"{START} 9. {START_REMEDY}"),
    ([A, None, 9, None], None, f"{START} 9. {START_REMEDY}"),
    ([A, [1, 1]], 3, f"a count for each of 3 ranks, got 2. {EACH_REMEDY}"),
    ([A, [1, 1, 1, 1]], 3, f"a count for each of 3 ranks, got 4. {EACH_REMEDY}"),
    ([A, 1, [0, 1], "d"], 3, f"a displacement for each of 3 ranks, got 2. {EACH_REMEDY}"),
    ([bytearray(10), MPI.FLOAT], None, f"whole elements of float32, 4 bytes each, got 10 bytes and no count. {ROUND}"),
    ([bytearray(3), "d"], 2, f"whole elements of float64, 8 bytes each, got 3 bytes and no count. {ROUND}"),
    (LOCKED, None, READ_ONLY.format("numpy.ndarray")),
    ([LOCKED, 2, "d"], 2, READ_ONLY.format("numpy.ndarray")),
    (b"bytes", None, READ_ONLY.format("bytes")),
    (
        [np.zeros((6, 8))[:, ::2], MPI.BYTE],
        None,
        "a contiguous buffer to be taken as uint8, got strides (64, 16) for shape (6, 4) of float64. "
        "Leave the datatype out, or pass a contiguous copy.",
    ),
    (
        np.zeros(8)[::-1],
        None,
        "a writable buffer with non-negative strides and no overlapping elements, got strides (-8,) for shape (8,). "
        "Pass a contiguous array, and copy the result from there.",
    ),
]


@pytest.mark.parametrize("spec, ranks, text", WRONG)
def test_a_wrong_argument_is_an_error_here_and_in_mpi4py(
    neighbours: Any, spec: Any, ranks: int | None, text: str
) -> None:
    with pytest.raises(BufferSpecError) as caught:
        read(spec, ranks, writable=True)
    assert str(caught.value) == f"rank 3: Allgather, received: expected {text}"
    assert (caught.value.rank, caught.value.topic) == (3, WHERE["topic"])
    graph, nothing = neighbours(ranks or 1), [np.zeros(0), "d"]
    with pytest.raises((TypeError, ValueError, KeyError, builtins.BufferError)):
        (graph.Neighbor_alltoallv if ranks else graph.Neighbor_alltoall)(nothing, spec)


VECTOR = "counts and displacements within the 8 elements of float64, got"
VECTOR_REMEDY = "Pass a longer buffer, or counts and displacements in elements of the datatype."


@pytest.mark.parametrize(
    "spec, text",
    [
        ([A, 5], f"{VECTOR} count 5 at displacement 5 for rank 1. {VECTOR_REMEDY}"),
        ([A, [3, 6]], f"{VECTOR} count 6 at displacement 3 for rank 1. {VECTOR_REMEDY}"),
        ([A, [9, 0]], f"{VECTOR} count 9 at displacement 0 for rank 0. {VECTOR_REMEDY}"),
        ([A, [-1, 2]], f"{VECTOR} count -1 at displacement 0 for rank 0. {VECTOR_REMEDY}"),
        ([A, ([2, 2], [0, 7])], f"{VECTOR} count 2 at displacement 7 for rank 1. {VECTOR_REMEDY}"),
        ([A, ([2, 2], [0, -1])], f"{VECTOR} count 2 at displacement -1 for rank 1. {VECTOR_REMEDY}"),
        ([A, 2, 7, "d"], f"{VECTOR} count 2 at displacement 7 for rank 1. {VECTOR_REMEDY}"),
        (
            [None, 1, "f"],
            "counts and displacements within the 0 elements of float32, got count 1 at displacement 0 for rank 0. "
            + VECTOR_REMEDY,
        ),
    ],
)
def test_vectors_past_the_end_are_errors_before_data_moves(spec: Any, text: str) -> None:
    with pytest.raises(BufferSpecError) as caught:
        read(spec, 2, writable=True)
    assert str(caught.value) == f"rank 3: Allgather, received: expected {text}"


@pytest.mark.parametrize(
    "spec, blocks, text",
    [
        ([A, 9], 1, f"a count from 0 to 8, as 8 elements of float64 are there for 1 blocks, got 9. {COUNT_REMEDY}"),
        ([A, 3], 3, f"a count from 0 to 2, as 8 elements of float64 are there for 3 blocks, got 3. {COUNT_REMEDY}"),
        (
            [A, 3, 6, "d"],
            1,
            f"a count from 0 to 2, as 2 elements of float64 are there for 1 blocks, got 3. {COUNT_REMEDY}",
        ),
        (
            [A, 17, "f"],
            1,
            f"a count from 0 to 16, as 16 elements of float32 are there for 1 blocks, got 17. {COUNT_REMEDY}",
        ),
        (
            A,
            3,
            "as many elements for each of 3 ranks, got 8 of float64. "
            "Pass a buffer whose length is a multiple of the number of ranks, or a count for each rank.",
        ),
        (
            [A, None, 1, None],
            2,
            "as many elements for each of 2 ranks, got 7 of float64. "
            "Pass a buffer whose length is a multiple of the number of ranks, or a count for each rank.",
        ),
    ],
)
def test_counts_past_the_end_are_errors_before_data_moves(spec: Any, blocks: int, text: str) -> None:
    with pytest.raises(BufferSpecError) as caught:
        read_blocks(spec, blocks=blocks, writable=True, **WHERE)
    assert str(caught.value) == f"rank 3: Allgather, received: expected {text}"
