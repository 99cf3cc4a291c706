"""What a buffer argument of mpi4py's methods means: which elements of which memory, for which rank.

The forms are mpi4py's own, as a list or a tuple; what is left out, or None, is worked out from the data:

    data                                          [data, datatype]
    [data, count]                                 [data, count, datatype]
    [data, (count, displacement)]                 [data, (count, displacement), datatype]
    [data, count, displacement, datatype]

A datatype is one of MPI's or a code such as "d" or "f8"; count and displacement are in elements of it. Vectors have
one of each for every rank, or a number for all: the same count, and displacements that far apart.

None is the answer where the data are good but not for our kernels: derived datatypes, pairs, long double, MPI.BOTTOM,
structured elements. mpi4py does those.
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
from mpi_gpucomp.engine.layout import Blocks
from mpi_gpucomp.errors import BufferSpecError

__all__ = ["aligned", "blocks", "vector"]

_CONSTANTS = type(MPI.BOTTOM), type(MPI.IN_PLACE)
"""They have a buffer of no bytes, for mpi4py alone."""


class _Place(NamedTuple):
    """What an error names first: the argument, and the rank that passed it."""

    topic: str
    rank: int

    def error(self, expected: str, got: str, remedy: str) -> BufferSpecError:
        return BufferSpecError(self.topic, expected=expected, got=got, remedy=remedy, rank=self.rank)


class _Parts(NamedTuple):
    """A buffer argument taken apart; None for what it leaves out."""

    data: Any
    count: Any = None
    displacement: Any = None
    datatype: Any = None


def blocks(
    spec: Any, *, blocks: int = 1, writable: bool, topic: str, rank: int, anywhere: bool = False
) -> Blocks | None:
    """Return the elements that an argument names, as so many blocks of the same length.

    `anywhere` takes those at odd addresses too, for whoever copies them before kernels see them.
    """
    if type(spec) is np.ndarray and (plain := _plain(spec, writable)) and not plain.count % blocks:
        return Blocks(plain, (0,), (plain.count,)) if blocks == 1 else Blocks.even(plain, blocks)
    place = _Place(topic, rank)
    parts = _taken_apart(spec, (tuple, list), place) if isinstance(spec, (tuple, list)) else _Parts(spec)
    buffer = _buffer(parts, writable, place, anywhere)
    if buffer is None:
        return None
    start, count = _even(parts, buffer, blocks, place)
    return Blocks(buffer, [start + block * count for block in range(blocks)], [count] * blocks)


def vector(spec: Any, ranks: int, *, writable: bool, topic: str, rank: int, anywhere: bool = False) -> Blocks | None:
    """Return the elements that an argument of a v-variant names, one block for each rank."""
    place = _Place(topic, rank)
    # Here a list stands for counts, and only a tuple for counts and displacements.
    parts = _taken_apart(spec, (tuple,), place) if isinstance(spec, (tuple, list)) else _Parts(spec)
    buffer = _buffer(parts, writable, place, anywhere)
    if buffer is None:
        return None
    counts = _counts(parts.count, buffer.count, ranks, place)
    starts = _displacements(parts.displacement, counts, place)
    for peer, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if count < 0 or (count and not 0 <= start <= buffer.count - count):
            raise place.error(
                f"counts and displacements within the {buffer.count} elements of {buffer.dtype}",
                f"count {count} at displacement {start} for rank {peer}",
                "Pass a longer buffer, or counts and displacements in elements of the datatype.",
            )
    # MPI looks at no displacement where the count is 0, so it may be anything.
    return Blocks(buffer, [start if count else 0 for start, count in zip(starts, counts, strict=True)], counts)


def _plain(array: np.ndarray[Any, Any], writable: bool) -> Buffer | None:
    """Describe an array in the usual case, as quickly as it goes; None in any other."""
    try:
        buffer = as_buffer(array)
    except BufferSpecError:
        return None
    usual = buffer.strides is None and not (writable and buffer.readonly) and aligned(buffer)
    return buffer if usual else None


def aligned(buffer: Buffer) -> bool:
    """Say whether kernels may work on the elements where they are: MPI moves them from any address, a GPU does not."""
    return not buffer.address & 7 or not buffer.address % _ALIGNMENT[buffer.dtype.name]


_ALIGNMENT = {known.name: known.itemsize // (2 if known.kind == "c" else 1) for known in DTYPES}


def _taken_apart(spec: Any, pair: tuple[type[Any], ...], place: _Place) -> _Parts:
    """Tell the parts of a list or a tuple by how many there are."""
    displacement = datatype = None
    if len(spec) == 2:
        data, count = spec
        if isinstance(count, (MPI.Datatype, str)):
            return _Parts(data, datatype=count)
    elif len(spec) == 3:
        data, count, datatype = spec
    elif len(spec) == 4:
        return _Parts(*spec)
    else:
        raise place.error(
            "2 to 4 items: data, then count, displacement and datatype or some of them",
            f"a {type_name(spec)} of {len(spec)}",
            "Pass the data alone, or for example [data, count, datatype].",
        )
    if isinstance(count, pair):
        if len(count) != 2:
            raise place.error(
                "a pair of count and displacement",
                f"a {type_name(count)} of {len(count)}",
                "Pass (count, displacement); for a v-variant counts are a list, (counts, displacements) a tuple.",
            )
        count, displacement = count
    return _Parts(data, count, displacement, datatype)


def _buffer(parts: _Parts, writable: bool, place: _Place, anywhere: bool) -> Buffer | None:
    """Describe the memory as elements of the datatype, None if that is for mpi4py."""
    data, dtype = parts.data, None
    if isinstance(data, _CONSTANTS):
        return None
    if parts.datatype is not None:
        dtype = _dtype(parts.datatype, place)
        if dtype is None:
            return None
    if data is None:
        return _nothing(dtype, place)
    buffer = _described(data, writable, place)
    if buffer is not None and dtype is not None and dtype is not buffer.dtype:
        buffer = _seen_as(dtype, buffer, parts.count is None, place)
    if buffer is None or (buffer.strides is None and not anywhere and not aligned(buffer)):
        return None
    return buffer


def _nothing(dtype: DType | None, place: _Place) -> Buffer:
    """Describe no elements: mpi4py lets a rank that has none say [None, datatype]."""
    if dtype is None:
        raise place.error(
            "a buffer, or a list or tuple that begins with one",
            "None",
            "Pass an array; where there is nothing to send or receive, [None, datatype].",
        )
    return Buffer(0, dtype, (0,))


def _described(data: Any, writable: bool, place: _Place) -> Buffer | None:
    """Describe the data as they are, None if mpi4py can reach them and we do not know their type."""
    try:
        buffer = as_buffer(data)
    except BufferSpecError as error:
        if _mpi4py_reaches(data):
            return None
        raise place.error(error.expected, error.got, error.remedy) from None
    if writable and (buffer.readonly or buffer.strides is not None):
        try:
            return as_buffer(data, writable=True)
        except BufferSpecError as error:
            raise place.error(error.expected, error.got, error.remedy) from None
    return buffer


def _mpi4py_reaches(data: Any) -> bool:
    """Ask mpi4py whether it finds memory without gaps."""
    try:
        MPI.Get_address(data)
    except Exception:  # whatever the data's own library raises
        return False
    return True


def _seen_as(dtype: DType, buffer: Buffer, whole: bool, place: _Place) -> Buffer:
    """Describe the same memory as elements of another type; `whole` if all of it must be used."""
    shape = buffer.shape
    if dtype.itemsize != buffer.dtype.itemsize:
        if buffer.strides is not None:
            raise place.error(
                f"a contiguous buffer to be taken as {dtype}",
                f"strides {buffer.strides} for shape {buffer.shape} of {buffer.dtype}",
                "Leave the datatype out, or pass a contiguous copy.",
            )
        count, rest = divmod(buffer.nbytes, dtype.itemsize)
        if rest and whole:
            raise place.error(
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
    )


def _dtype(datatype: Any, place: _Place) -> DType | None:
    """Return the element type that a datatype or its code stands for, None if kernels do not know it."""
    if isinstance(datatype, MPI.Datatype):
        return _dtypes().get(datatype.handle)
    try:
        return _dtypes().get(MPI.Datatype.fromcode(datatype).handle)
    except (TypeError, ValueError):
        raise place.error(
            "an MPI datatype, or a code for one such as 'd' or 'f8'",
            repr(datatype) if isinstance(datatype, str) else type_name(datatype),
            "Pass for example MPI.DOUBLE, or leave it out for the data's own type.",
        ) from None


@cache
def _dtypes() -> dict[int, DType]:
    """Map the handles of MPI's own datatypes to element types, by the kind and size that mpi4py says they have."""
    known = {f"{dtype.kind}{dtype.itemsize}": dtype for dtype in DTYPES if dtype.name != "bfloat16"}
    characters = {"S1": "u1", "U1": f"u{MPI.WCHAR.size}"}
    found = {}
    for datatype in vars(MPI).values():
        # Packed bytes mean something to MPI alone.
        if isinstance(datatype, MPI.Datatype) and datatype not in (MPI.DATATYPE_NULL, MPI.PACKED):
            code = datatype.typestr
            dtype = known.get(characters.get(code, code))
            # A type that this MPI was built without can have a name, but has no size.
            if dtype is not None and datatype.size == datatype.extent == dtype.itemsize:
                found[datatype.handle] = dtype
    brain, bfloat16 = getattr(MPI, "BFLOAT16_T", MPI.DATATYPE_NULL), dtype_of_name("bfloat16")
    if brain != MPI.DATATYPE_NULL and bfloat16 is not None:
        found[brain.handle] = bfloat16
    return found


def _even(parts: _Parts, buffer: Buffer, blocks: int, place: _Place) -> tuple[int, int]:
    """Return the first element of the first block, and the length of each."""
    start = 0 if parts.displacement is None else _number(parts.displacement, "displacement", place)
    if not 0 <= start <= buffer.count:
        raise place.error(
            f"a displacement from 0 to the {buffer.count} elements of {buffer.dtype} that there are",
            str(start),
            "Count it in elements of the datatype, from the start of the buffer.",
        )
    room = buffer.count - start
    count = room // blocks if parts.count is None else _number(parts.count, "count", place)
    if parts.count is None and room % blocks:
        raise place.error(
            f"as many elements for each of {blocks} ranks",
            f"{room} of {buffer.dtype}",
            "Pass a buffer whose length is a multiple of the number of ranks, or a count for each rank.",
        )
    if not 0 <= count * blocks <= room:
        raise place.error(
            f"a count from 0 to {room // blocks}, as {room} elements of {buffer.dtype} are there for {blocks} blocks",
            str(count),
            "Pass a longer buffer, or the count of one block in elements of the datatype.",
        )
    return start, count


def _counts(counts: Any, total: int, ranks: int, place: _Place) -> list[int]:
    """Return each rank's count: as given, the same for all, or a fair share with the longer ones first."""
    if counts is None:
        share, rest = divmod(total, ranks)
        return [share + (rank < rest) for rank in range(ranks)]
    given = _numbers(counts, ranks, "count", place)
    return [given] * ranks if isinstance(given, int) else given


def _displacements(displacements: Any, counts: list[int], place: _Place) -> list[int]:
    """Return each rank's displacement: as given, at equal distances, or one rank's elements behind the other's."""
    if displacements is None:
        return list(accumulate(counts[:-1], initial=0))
    given = _numbers(displacements, len(counts), "displacement", place)
    return [rank * given for rank in range(len(counts))] if isinstance(given, int) else given


def _numbers(values: Any, ranks: int, what: str, place: _Place) -> int | list[int]:
    """Return one number for all ranks, or one for each; as in mpi4py an array can be a single number too."""
    try:
        return index(values)
    except TypeError:
        length = length_hint(values, -1) if hasattr(values, "__getitem__") else -1
    if length < 0:
        return _number(values, what, place)
    if length != ranks:
        raise place.error(f"a {what} for each of {ranks} ranks", str(length), "Pass one for each rank, in order.")
    return [_number(values[rank], what, place) for rank in range(ranks)]


def _number(value: Any, what: str, place: _Place) -> int:
    try:
        return index(value)
    except TypeError:
        raise place.error(f"an integer as {what}", type_name(value), "Pass an int, or an integer of numpy.") from None
