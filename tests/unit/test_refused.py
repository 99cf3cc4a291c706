"""What the project's own codecs refuse before any work is queued, and what they say then."""

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


def refusal(codec: Codec, call: Any) -> str:
    with pytest.raises(BufferSpecError) as caught:
        call()
    message = str(caught.value)
    start = f"codec {codec.spec}: expected "
    assert message.startswith(start)
    return message.removeprefix(start)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec != "none"])
def test_a_wrong_type(spec: str, stream: Stream) -> None:
    codec, numbers = get_codec(spec), np.arange(8, dtype=np.int32)
    expected = f"elements of type {' or '.join(codec.dtypes)}, got int32. "
    expected += "Choose a codec for this type: 'python -m mpi_gpucomp codecs' lists them."
    with upload(numbers, stream) as memory:
        buffer = buffer_in(memory, numbers)
        assert refusal(codec, lambda: codec.encode(buffer, memory, stream)) == expected
        assert refusal(codec, lambda: codec.decode(memory, 4, buffer, stream)) == expected


@every_kind
def test_too_little_room(spec: str, name: str, stream: Stream) -> None:
    codec, array = get_codec(spec), np.zeros(100, FLOATS[name])
    needed = codec.max_encoded(100, as_dtype(name))
    with upload(array, stream) as memory, stream.device.alloc(needed - 1) as room:
        message = refusal(codec, lambda: codec.encode(buffer_in(memory, array), room, stream))
    assert message == f"room for {needed} encoded bytes, got {needed - 1}. Take as many bytes as max_encoded says."


@every_kind
def test_wrong_buffers(spec: str, name: str, stream: Stream) -> None:
    codec, here = get_codec(spec), stream.device.name
    place = f"contiguous elements on {here}, where the stream is, got {{}}. "
    place += "Use a stream of the buffer's device, and pack strided elements first."
    wrong = {
        place.format("contiguous ones on cuda:7"): {"device": "cuda:7"},
        place.format(f"strided ones on {here}"): {"device": here, "strides": (64,)},
    }
    readonly = "a buffer that may be written, got a read-only one. Pass a copy that may be written."
    with stream.device.alloc(4096) as memory:
        for expected, facts in wrong.items():
            buffer = Buffer(memory.address, as_dtype(name), (8,), **facts)  # type: ignore[arg-type]
            assert refusal(codec, lambda buffer=buffer: codec.encode(buffer, memory, stream)) == expected
            assert refusal(codec, lambda buffer=buffer: codec.decode(memory, 64, buffer, stream)) == expected
        fixed = Buffer(memory.address, as_dtype(name), (8,), device=here, readonly=True)
        assert refusal(codec, lambda: codec.decode(memory, 64, fixed, stream)) == readonly
        message = refusal(codec, lambda: codec.decode_reduce(memory, 64, fixed, "mean", stream))
    assert message == (
        f"an operation that {name} has: replace, sum, prod, min, max, got mean. "
        "Choose another operation, or elements of another type."
    )
