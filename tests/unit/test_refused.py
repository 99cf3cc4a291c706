"""Arguments that the kernel codecs reject before any work is queued, with the full error texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from coding import buffer_in, upload
from floats import FLOATS

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.device import Buffer, dtype_of_name
from mpi_gpucomp.errors import BufferSpecError

if TYPE_CHECKING:
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.device import Stream

SPECS = ["none", "zfp:rate=8", "mpc", "mpc:stride=5", "split", "bound:abs=0.001", "bound:rel=0.01"]
SPECS += ["cast:bf16", "cast:f16", "cast:f32"]
KINDS = [(spec, name) for spec in SPECS for name in get_codec(spec).dtypes if name in FLOATS]
every_kind = pytest.mark.parametrize(("spec", "name"), KINDS)


def as_dtype(name: str) -> Any:
    return dtype_of_name(name)


def rejected(codec: Codec, call: Any) -> str:
    with pytest.raises(BufferSpecError) as caught:
        call()
    message = str(caught.value)
    start = f"codec {codec.spec}: expected "
    assert message.startswith(start)
    return message.removeprefix(start)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec != "none"])
def test_an_unsupported_type_is_an_error(spec: str, stream: Stream) -> None:
    codec, numbers = get_codec(spec), np.arange(8, dtype=np.int32)
    expected = f"elements of type {' or '.join(codec.dtypes)}, got int32. "
    expected += "Choose a codec for this type: 'python -m mpi_gpucomp codecs' lists them."
    with upload(numbers, stream) as memory:
        buffer = buffer_in(memory, numbers)
        assert rejected(codec, lambda: codec.encode(buffer, memory, stream)) == expected
        assert rejected(codec, lambda: codec.decode(memory, 4, buffer, stream)) == expected


@every_kind
def test_too_little_capacity_is_an_error(spec: str, name: str, stream: Stream) -> None:
    codec, array = get_codec(spec), np.zeros(100, FLOATS[name])
    needed = codec.max_encoded(100, as_dtype(name))
    with upload(array, stream) as memory, stream.device.alloc(needed - 1) as memory_too_small:
        message = rejected(codec, lambda: codec.encode(buffer_in(memory, array), memory_too_small, stream))
    assert message == f"capacity for {needed} encoded bytes, got {needed - 1}. Allocate max_encoded bytes."


@every_kind
def test_unsuitable_buffers_are_errors(spec: str, name: str, stream: Stream) -> None:
    codec, here = get_codec(spec), stream.device.name
    device = f"elements on {here}, the stream's device, got elements on cuda:7. Use a stream of the buffer's device."
    strided = "contiguous elements, got strides (64,) for shape (8,). Pack strided elements first."
    wrong = {device: {"device": "cuda:7"}, strided: {"device": here, "strides": (64,)}}
    readonly = "a writable buffer, got a read-only one. Pass a writable copy."
    with stream.device.alloc(4096) as memory:
        for expected, fields in wrong.items():
            buffer = Buffer(memory.address, as_dtype(name), (8,), **fields)  # type: ignore[arg-type]
            assert rejected(codec, lambda buffer=buffer: codec.encode(buffer, memory, stream)) == expected
            assert rejected(codec, lambda buffer=buffer: codec.decode(memory, 64, buffer, stream)) == expected
        fixed = Buffer(memory.address, as_dtype(name), (8,), device=here, readonly=True)
        assert rejected(codec, lambda: codec.decode(memory, 64, fixed, stream)) == readonly
        message = rejected(codec, lambda: codec.decode_reduce(memory, 64, fixed, "mean", stream))
    assert message == (
        f"an operation defined for {name}: replace, sum, prod, min, max, got mean. "
        "Choose another operation, or elements of another type."
    )
