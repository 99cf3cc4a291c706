"""The codec none: raw bytes, and reductions of every type."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from coding import decode, encode, values
from floats import REDUCTIONS

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.device import DTYPES
from mpi_gpucomp.errors import BufferSpecError, DecodeError

if TYPE_CHECKING:
    from mpi_gpucomp.device import DType, Stream

RAW = get_codec("none")
UNDEFINED = {("complex64", "min"), ("complex64", "max"), ("complex128", "min"), ("complex128", "max"), ("bool", "sum")}
every_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_type
@pytest.mark.parametrize("count", [0, 1, 1023, 5003])
def test_the_bytes_are_the_elements(dtype: DType, count: int, stream: Stream) -> None:
    array = values(dtype.name, count)
    data = encode(RAW, array, stream)
    assert data == array.tobytes()
    assert RAW.encoded_size(count, dtype) == RAW.max_encoded(count, dtype) == len(data)
    back = np.zeros_like(array)
    assert decode(RAW, data, back, stream) == len(data)
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("name", "op"), [(t.name, op) for t in DTYPES for op in REDUCTIONS if (t.name, op) not in UNDEFINED]
)
def test_decode_and_reduce(name: str, op: str, stream: Stream) -> None:
    target, arriving = values(name, 3001, 1), values(name, 3001, 2)
    expected = REDUCTIONS[op](target, arriving).astype(target.dtype)
    assert decode(RAW, encode(RAW, arriving, stream), target, stream, op) == target.nbytes
    assert target.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("name", "op", "known"),
    [
        ("complex64", "max", "replace, sum, prod"),
        ("complex128", "min", "replace, sum, prod"),
        ("bool", "sum", "replace, prod, min, max"),
        ("int32", "mean", "replace, sum, prod, min, max"),
    ],
)
def test_undefined_operations_are_errors(name: str, op: str, known: str, stream: Stream) -> None:
    here = values(name, 3)
    with pytest.raises(BufferSpecError) as caught:
        decode(RAW, here.tobytes(), here, stream, op)
    assert str(caught.value) == (
        f"codec none: expected an operation defined for {name}: {known}, got {op}. "
        "Choose another operation, or elements of another type."
    )


@pytest.mark.parametrize("nbytes", [0, 7, 9])
def test_a_wrong_length_is_an_error(nbytes: int, stream: Stream) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(RAW, bytes(nbytes), np.zeros(2, np.float32), stream)
    assert str(caught.value) == (
        f"codec none: expected an encoding of 2 elements, got {nbytes} bytes instead of 8. "
        "The bytes were damaged or truncated in transit, or written by another codec."
    )
