"""Buffer arguments in mpi4py's forms: which elements of which memory, for which rank.

A spec is the data alone, or a list or tuple; what is left out, or None, follows from the data:

    data                                          [data, datatype]
    [data, count]                                 [data, count, datatype]
    [data, (count, displacement)]                 [data, (count, displacement), datatype]
    [data, count, displacement, datatype]

A datatype is an MPI datatype or a code such as "d" or "f8"; counts and displacements are in elements of it. In
v-variants each is a sequence with one item per rank, or one number: the same count for all, and displacements at
that stride.

`UnsupportedError` is raised for valid buffers that our kernels cannot process (derived datatypes, MPI.BOTTOM, long
double, structured elements): the call is then passed through to the MPI library.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from operator import index, length_hint
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpi_gpucomp.device import DTYPES, Buffer, DType, as_buffer, dtype_of_name
from mpi_gpucomp.device.buffer import type_name
from mpi_gpucomp.device.producer import mark_producer
from mpi_gpucomp.engine.program import Blocks
from mpi_gpucomp.errors import BufferSpecError

__all__ = ["UnsupportedError", "is_aligned", "read_blocks", "read_vector"]

_CONSTANTS = type(MPI.BOTTOM), type(MPI.IN_PLACE)
"""They export an empty buffer that only mpi4py understands."""


class UnsupportedError(Exception):
    """A valid argument that only the MPI library can process; the text says why."""


class _Argument(NamedTuple):
    """What errors name first: the argument and the rank that passed it; and the producer's stream."""

    topic: str
    rank: int
    stream: int | None = None
    """The stream that produces the buffer, if not the one that its library names."""

    def error(self, expected: str, got: str, remedy: str) -> BufferSpecError:
        return BufferSpecError(self.topic, expected=expected, got=got, remedy=remedy, rank=self.rank)


class _Spec(NamedTuple):
    """The parts of a spec; None for those left out."""

    data: Any
    count: Any = None
    displacement: Any = None
    datatype: Any = None


def read_blocks(
    spec: Any,
    *,
    blocks: int = 1,
    writable: bool,
    topic: str,
    rank: int,
    allow_unaligned: bool = False,
    stream: int | None = None,
) -> Blocks:
    """Return the elements that a spec names, as `blocks` blocks of equal length.

    With `allow_unaligned`, elements at unaligned addresses are accepted: the caller packs them before kernels run.
    `stream` is the handle of the stream that produces them, if not the one that their library names.
    """
    if type(spec) is np.ndarray and (buffer := _usual_array(spec, writable)) and not buffer.count % blocks:
        return Blocks(buffer, (0,), (buffer.count,)) if blocks == 1 else Blocks.even(buffer, blocks)
    argument = _Argument(topic, rank, stream)
    parts = _split_spec(spec, (tuple, list), argument) if isinstance(spec, (tuple, list)) else _Spec(spec)
    buffer = _read_buffer(parts, writable, argument, allow_unaligned)
    start, count = _even_block(parts, buffer, blocks, argument)
    return Blocks(buffer, [start + block * count for block in range(blocks)], [count] * blocks)


def read_vector(
    spec: Any,
    ranks: int,
    *,
    writable: bool,
    topic: str,
    rank: int,
    allow_unaligned: bool = False,
    stream: int | None = None,
) -> Blocks:
    """Return the elements that a spec of a v-variant names, one block per rank."""
    argument = _Argument(topic, rank, stream)
    # In v-variants a list is a sequence of counts; only a tuple is (counts, displacements).
    parts = _split_spec(spec, (tuple,), argument) if isinstance(spec, (tuple, list)) else _Spec(spec)
    buffer = _read_buffer(parts, writable, argument, allow_unaligned)
    counts = _counts(parts.count, buffer.count, ranks, argument)
    starts = _displacements(parts.displacement, counts, argument)
    for peer, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if count < 0 or (count and not 0 <= start <= buffer.count - count):
            raise argument.error(
                f"counts and displacements within the {buffer.count} elements of {buffer.dtype}",
                f"count {count} at displacement {start} for rank {peer}",
                "Pass a longer buffer, or counts and displacements in elements of the datatype.",
            )
    # MPI ignores the displacement of an empty block, so it may be out of range.
    return Blocks(buffer, [start if count else 0 for start, count in zip(starts, counts, strict=True)], counts)


def _usual_array(array: np.ndarray[Any, Any], writable: bool) -> Buffer | None:
    """Fast path: describe a contiguous, aligned array; return None in any other case."""
    try:
        buffer = as_buffer(array)
    except BufferSpecError:
        return None
    usual = buffer.strides is None and not (writable and buffer.readonly) and is_aligned(buffer)
    return buffer if usual else None


def is_aligned(buffer: Buffer) -> bool:
    """Return True if kernels can access the elements in place: MPI accepts any address, a GPU does not."""
    return not buffer.address & 7 or not buffer.address % _ALIGNMENT[buffer.dtype.name]


_ALIGNMENT = {known.name: known.itemsize // (2 if known.kind == "c" else 1) for known in DTYPES}


def _split_spec(spec: Any, pair: tuple[type[Any], ...], argument: _Argument) -> _Spec:
    """Return the parts of a list or tuple, which its length tells apart."""
    displacement = datatype = None
    if len(spec) == 2:
        data, count = spec
        if isinstance(count, (MPI.Datatype, str)):
            return _Spec(data, datatype=count)
    elif len(spec) == 3:
        data, count, datatype = spec
    elif len(spec) == 4:
        return _Spec(*spec)
    else:
        raise argument.error(
            "2 to 4 items: data, then count, displacement and datatype or some of them",
            f"a {type_name(spec)} of {len(spec)}",
            "Pass the data alone, or for example [data, count, datatype].",
        )
    if isinstance(count, pair):
        if len(count) != 2:
            raise argument.error(
                "a pair of count and displacement",
                f"a {type_name(count)} of {len(count)}",
                "Pass (count, displacement); for a v-variant counts are a list, (counts, displacements) a tuple.",
            )
        count, displacement = count
    return _Spec(data, count, displacement, datatype)


def _read_buffer(parts: _Spec, writable: bool, argument: _Argument, allow_unaligned: bool) -> Buffer:
    """Return the memory of a spec as elements of its datatype."""
    data, dtype = parts.data, None
    if isinstance(data, _CONSTANTS):
        raise UnsupportedError("MPI.BOTTOM" if data is MPI.BOTTOM else "MPI.IN_PLACE")
    if parts.datatype is not None:
        dtype = _read_dtype(parts.datatype, argument)
    if data is None:
        return _empty_buffer(dtype, argument)
    buffer = mark_producer(_describe(data, writable, argument), argument.stream)
    if dtype is not None and dtype is not buffer.dtype:
        buffer = _view_as(dtype, buffer, parts.count is None, argument)
    if buffer.strides is None and not allow_unaligned and not is_aligned(buffer):
        raise UnsupportedError("an unaligned address")
    return buffer


def _empty_buffer(dtype: DType | None, argument: _Argument) -> Buffer:
    """Return a buffer of no elements: mpi4py accepts [None, datatype] from a rank that has none."""
    if dtype is None:
        raise argument.error(
            "a buffer, or a list or tuple that begins with one",
            "None",
            "Pass an array; where there is nothing to send or receive, [None, datatype].",
        )
    return Buffer(0, dtype, (0,))


def _describe(data: Any, writable: bool, argument: _Argument) -> Buffer:
    """Return the data as a buffer of their own element type."""
    try:
        buffer = as_buffer(data)
    except BufferSpecError as error:
        if _mpi4py_accepts(data):
            raise UnsupportedError(error.got) from None
        raise argument.error(error.expected, error.got, error.remedy) from None
    if writable and (buffer.readonly or buffer.strides is not None):
        try:
            return as_buffer(data, writable=True)
        except BufferSpecError as error:
            raise argument.error(error.expected, error.got, error.remedy) from None
    return buffer


def _mpi4py_accepts(data: Any) -> bool:
    """Return True if mpi4py finds contiguous memory in the data."""
    if isinstance(data, np.ndarray) and data.dtype.hasobject:
        return False  # it has memory, but no datatype
    try:
        MPI.Get_address(data)
    except Exception:  # any error of the exporting library
        return False
    return True


def _view_as(dtype: DType, buffer: Buffer, whole: bool, argument: _Argument) -> Buffer:
    """Return the same memory as elements of another type; `whole` requires that no byte is left over."""
    shape = buffer.shape
    if dtype.itemsize != buffer.dtype.itemsize:
        if buffer.strides is not None:
            raise argument.error(
                f"a contiguous buffer to be taken as {dtype}",
                f"strides {buffer.strides} for shape {buffer.shape} of {buffer.dtype}",
                "Leave the datatype out, or pass a contiguous copy.",
            )
        count, rest = divmod(buffer.nbytes, dtype.itemsize)
        if rest and whole:
            raise argument.error(
                f"whole elements of {dtype}, {dtype.itemsize} bytes each",
                f"{buffer.nbytes} bytes and no count",
                "Pass a count, or a buffer whose length in bytes is a multiple.",
            )
        shape = (count,)
    return Buffer(
        buffer.address,
        dtype,
        shape,
        device=buffer.device,
        strides=buffer.strides,
        readonly=buffer.readonly,
        owner=buffer.owner,
        producer_stream=buffer.producer_stream,
        produced=buffer.produced,
    )


def _read_dtype(datatype: Any, argument: _Argument) -> DType:
    """Return the element type of an MPI datatype or of a code for one."""
    if not isinstance(datatype, MPI.Datatype):
        try:
            datatype = MPI.Datatype.fromcode(datatype)
        except (TypeError, ValueError):
            raise argument.error(
                "an MPI datatype, or a code for one such as 'd' or 'f8'",
                repr(datatype) if isinstance(datatype, str) else type_name(datatype),
                "Pass for example MPI.DOUBLE, or leave it out for the data's own type.",
            ) from None
    dtype = _dtypes().get(datatype.handle)
    if dtype is None:
        named = datatype != MPI.DATATYPE_NULL and datatype.is_predefined
        raise UnsupportedError(f"the datatype {datatype.Get_name()}" if named else "a derived datatype")
    return dtype


@cache
def _dtypes() -> dict[int, DType]:
    """Map handles of predefined MPI datatypes to element types of the same kind and size."""
    known = {f"{dtype.kind}{dtype.itemsize}": dtype for dtype in DTYPES if dtype.name != "bfloat16"}
    characters = {"S1": "u1", "U1": f"u{MPI.WCHAR.size}"}
    found = {}
    for datatype in vars(MPI).values():
        # Packed bytes are opaque.
        if isinstance(datatype, MPI.Datatype) and datatype not in (MPI.DATATYPE_NULL, MPI.PACKED):
            code = datatype.typestr
            dtype = known.get(characters.get(code, code))
            # A datatype that this MPI was built without has a name but no size.
            if dtype is not None and datatype.size == datatype.extent == dtype.itemsize:
                found[datatype.handle] = dtype
    brain, bfloat16 = getattr(MPI, "BFLOAT16_T", MPI.DATATYPE_NULL), dtype_of_name("bfloat16")
    if brain != MPI.DATATYPE_NULL and bfloat16 is not None:
        found[brain.handle] = bfloat16
    return found


def _even_block(parts: _Spec, buffer: Buffer, blocks: int, argument: _Argument) -> tuple[int, int]:
    """Return the first element of the first block, and the length of each block."""
    start = 0 if parts.displacement is None else _number(parts.displacement, "displacement", argument)
    if not 0 <= start <= buffer.count:
        raise argument.error(
            f"a displacement from 0 to the {buffer.count} elements of {buffer.dtype} that there are",
            str(start),
            "Count it in elements of the datatype, from the start of the buffer.",
        )
    room = buffer.count - start
    count = room // blocks if parts.count is None else _number(parts.count, "count", argument)
    if parts.count is None and room % blocks:
        raise argument.error(
            f"as many elements for each of {blocks} ranks",
            f"{room} of {buffer.dtype}",
            "Pass a buffer whose length is a multiple of the number of ranks, or a count for each rank.",
        )
    if not 0 <= count * blocks <= room:
        raise argument.error(
            f"a count from 0 to {room // blocks}, as {room} elements of {buffer.dtype} are there for {blocks} blocks",
            str(count),
            "Pass a longer buffer, or the count of one block in elements of the datatype.",
        )
    return start, count


def _counts(counts: Any, total: int, ranks: int, argument: _Argument) -> list[int]:
    """Return the count of each rank: as given, one for all, or an even share with the longer ones first."""
    if counts is None:
        share, rest = divmod(total, ranks)
        return [share + (rank < rest) for rank in range(ranks)]
    given = _numbers(counts, ranks, "count", argument)
    return [given] * ranks if isinstance(given, int) else given


def _displacements(displacements: Any, counts: list[int], argument: _Argument) -> list[int]:
    """Return the displacement of each rank: as given, at a fixed stride, or packed."""
    if displacements is None:
        return list(accumulate(counts[:-1], initial=0))
    given = _numbers(displacements, len(counts), "displacement", argument)
    return [rank * given for rank in range(len(counts))] if isinstance(given, int) else given


def _numbers(values: Any, ranks: int, what: str, argument: _Argument) -> int | list[int]:
    """Return one number for all ranks, or one per rank; as in mpi4py an array may hold a single number."""
    try:
        return index(values)
    except TypeError:
        length = length_hint(values, -1) if hasattr(values, "__getitem__") else -1
    if length < 0:
        return _number(values, what, argument)
    if length != ranks:
        raise argument.error(f"a {what} for each of {ranks} ranks", str(length), "Pass one for each rank, in order.")
    return [_number(values[rank], what, argument) for rank in range(ranks)]


def _number(value: Any, what: str, argument: _Argument) -> int:
    try:
        return index(value)
    except TypeError:
        raise argument.error(f"an integer as {what}", type_name(value), "Pass an int or a numpy integer.") from None
