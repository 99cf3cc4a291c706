"""The general codecs on the host: round trips, interoperability with other libraries, reductions, parameters."""

from __future__ import annotations

import sys
import threading
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from coding import decode, download, encode, upload, values
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_gpucomp.codec import general
from mpi_gpucomp.codec.general import GENERAL_CODECS, Ans, Deflate, Gdeflate, Lz4, Snappy, Zstd
from mpi_gpucomp.device import DTYPES, Memory, as_buffer, get_device
from mpi_gpucomp.errors import BufferSpecError, DecodeError, DeviceError, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpi_gpucomp.codec.general import GeneralCodec
    from mpi_gpucomp.device import Stream

pytest.importorskip("cramjam")

HOST = [codec for codec in GENERAL_CODECS if codec.format.standard]
GPU_ONLY = [codec for codec in GENERAL_CODECS if not codec.format.standard]
GUARD = 64

any_format = pytest.mark.parametrize("kind", HOST, ids=lambda kind: kind.name)


@pytest.fixture(scope="module")
def stream() -> Iterator[Stream]:
    stream = get_device("host").stream()
    yield stream
    stream.close()


@any_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 70001])
def test_round_trip_of_every_type(kind: type[GeneralCodec], dtype: Any, count: int, stream: Stream) -> None:
    array = values(dtype.name, count)
    back = np.zeros_like(array)
    data = encode(kind(), array, stream)
    assert decode(kind(), data, back, stream) == array.nbytes
    assert back.tobytes() == array.tobytes()
    assert count < 100 or len(data) < array.nbytes * 0.8


@any_format
@settings(max_examples=60)
@given(data=st.binary(max_size=2000), times=st.integers(1, 40))
def test_round_trip_of_any_bytes(kind: type[GeneralCodec], data: bytes, times: int) -> None:
    stream = get_device("host").stream(inline=True)
    array = np.frombuffer(data * times, np.uint8)
    back = np.empty_like(array)
    decode(kind(), encode(kind(), array, stream), back, stream)
    assert back.tobytes() == array.tobytes()


def snappy_decoder(data: bytes) -> bytes:
    """Decode Snappy without framing, independently of cramjam, on which python-snappy is built."""
    out, at, length, shift = bytearray(), 0, 0, 0
    while True:
        length |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            break
    while at < len(data):
        tag, kind = data[at], data[at] & 3
        at += 1
        if kind == 0:
            size, extra = (tag >> 2) + 1, max(0, (tag >> 2) - 59)
            if extra:
                size = int.from_bytes(data[at : at + extra], "little") + 1
            at += extra
            out += data[at : at + size]
            at += size
            continue
        width = {1: 1, 2: 2, 3: 4}[kind]
        offset = int.from_bytes(data[at : at + width], "little") + (tag >> 5 << 8 if kind == 1 else 0)
        at += width
        for _ in range((tag >> 2 & 7) + 4 if kind == 1 else (tag >> 2) + 1):
            out.append(out[-offset])
    assert len(out) == length
    return bytes(out)


def other_library(name: str, size: int) -> tuple[Callable[[bytes], bytes] | None, Callable[[bytes], bytes]]:
    """Return the encoder, if there is one, and the decoder of another implementation."""
    if name == "lz4":
        block = pytest.importorskip("lz4.block")
        return (lambda b: block.compress(b, store_size=False)), lambda b: block.decompress(b, uncompressed_size=size)
    if name == "zstd":
        zstandard = pytest.importorskip("zstandard")
        return zstandard.ZstdCompressor(level=5).compress, zstandard.ZstdDecompressor().decompress
    if name == "deflate":
        return (lambda b: zlib.compress(b, 7, -15)), lambda b: zlib.decompress(b, -15)
    return None, snappy_decoder


@any_format
@pytest.mark.parametrize("count", [1, 1000, 100_000])
def test_interoperability_with_other_libraries(kind: type[GeneralCodec], count: int, stream: Stream) -> None:
    array = np.random.default_rng(count).normal(0, 1, count).astype(np.float16).repeat(2)
    their_encoder, their_decoder = other_library(kind.name, array.nbytes)
    assert their_decoder(encode(kind(), array, stream)) == array.tobytes()
    if their_encoder is not None:
        back = np.empty_like(array)
        decode(kind(), their_encoder(array.tobytes()), back, stream)
        assert back.tobytes() == array.tobytes()


def test_snappy_bytes_written_by_hand(stream: Stream) -> None:
    back = np.empty(12, np.uint8)
    decode(Snappy(), b"\x0c" + b"\x0cabcd" + b"\x11\x04", back, stream)
    assert back.tobytes() == b"abcdabcdabcd"


def test_zstd_frames_have_a_content_size_for_nvcomp(stream: Stream) -> None:
    zstandard = pytest.importorskip("zstandard")
    data = encode(Zstd(), np.arange(1000), stream)
    assert zstandard.get_frame_parameters(data).content_size == 8000


@any_format
@pytest.mark.parametrize("count", [1, 2, 60, 1000, 65_536, 131_073, 400_000])
def test_noise_stays_within_max_encoded(kind: type[GeneralCodec], count: int, stream: Stream) -> None:
    noise = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
    bound = kind().max_encoded(count, as_buffer(noise).dtype)
    with upload(np.full(bound + GUARD, 7, np.uint8), stream) as memory:
        room = Memory(memory.address, bound, memory.device, memory)
        size = kind().encode(as_buffer(noise), room, stream).result()
        assert size is not None and 0 < size <= bound
        assert download(memory.address + bound, GUARD, stream) == b"\x07" * GUARD


def test_too_little_capacity_is_an_error(stream: Stream) -> None:
    with pytest.raises(BufferSpecError) as caught:
        Lz4().encode(as_buffer(np.zeros(100, np.float32)), upload(b"x" * 480, stream), stream)
    assert str(caught.value) == (
        "codec lz4: expected capacity for 481 encoded bytes, got 480. Allocate max_encoded bytes."
    )


REDUCTIONS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
UNDEFINED = {("complex64", "min"), ("complex64", "max"), ("complex128", "min"), ("complex128", "max"), ("bool", "sum")}


@any_format
@pytest.mark.parametrize(
    ("name", "op"), [(t.name, op) for t in DTYPES for op in REDUCTIONS if (t.name, op) not in UNDEFINED]
)
def test_decode_and_reduce(kind: type[GeneralCodec], name: str, op: str, stream: Stream) -> None:
    target, arriving = values(name, 3001, 1), values(name, 3001, 2)
    expected = REDUCTIONS[op](target, arriving)
    assert decode(kind(), encode(kind(), arriving, stream), target, stream, op) == target.nbytes
    assert target.tobytes() == expected.astype(target.dtype).tobytes()


@pytest.mark.parametrize(
    ("dtype", "op", "known"),
    [
        ("complex64", "max", "replace, sum, prod"),
        ("bool", "sum", "replace, prod, min, max"),
        ("float32", "mean", "replace, sum, prod, min, max"),
    ],
)
def test_undefined_operations_are_errors(dtype: str, op: str, known: str, stream: Stream) -> None:
    with pytest.raises(BufferSpecError) as caught:
        decode(Zstd(), b"x", values(dtype, 3), stream, op)
    assert str(caught.value) == (
        f"codec zstd: expected an operation defined for {dtype}: {known}, got {op}. "
        "Choose another operation, or elements of another type."
    )


@any_format
def test_work_runs_in_stream_order(kind: type[GeneralCodec], stream: Stream) -> None:
    array, back = values("int32", 1000), np.zeros(1000, np.int32)
    room = stream.device.alloc(kind().max_encoded(1000, as_buffer(array).dtype))
    gate = threading.Event()
    stream.run(lambda: gate.wait(60) and None)
    encoding = kind().encode(as_buffer(array), room, stream)
    assert not encoding.done()
    gate.set()
    decoding = kind().decode(room, encoding.result() or 0, as_buffer(back), stream)
    stream.synchronize()
    assert encoding.done() and decoding.done()
    assert (back == array).all()


def test_no_allocation_after_warm_up(stream: Stream) -> None:
    array = values("float32", 20_000)
    pool = get_device("host").pool

    def once() -> None:
        decode(Zstd(), encode(Zstd(), array, stream), np.zeros_like(array), stream, "sum")

    once()
    before = pool.statistics.allocations
    once()
    assert pool.statistics.allocations == before


@any_format
def test_a_buffer_too_long_for_the_format_is_sent_raw(
    kind: type[GeneralCodec], stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = values("uint8", 101)
    data = encode(kind(), array, stream)
    monkeypatch.setitem(general.HOST_LIMITS, kind.name, 100)
    room = stream.device.alloc(10_000)
    assert kind().encode(as_buffer(array), room, stream).result() is None
    assert kind().encode(as_buffer(array[:100]), room, stream).result() is not None
    with pytest.raises(DecodeError, match="got a length that the format does not support"):
        decode(kind(), data, np.empty_like(array), stream)


@pytest.mark.parametrize("kind", [Zstd, Deflate])
def test_decoding_does_not_depend_on_the_level(kind: type[GeneralCodec], stream: Stream) -> None:
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8)
    fast, dense = kind(), kind.from_parameters({"level": "9"})
    data = encode(dense, text, stream)
    assert len(data) < len(encode(fast, text, stream))
    assert fast.wire_id == dense.wire_id
    back = np.empty_like(text)
    decode(fast, data, back, stream)
    assert (back == text).all()


def test_wire_ids_and_specs() -> None:
    assert {codec.name: codec().wire_id for codec in GENERAL_CODECS} == {
        "lz4": 0x10010000,
        "snappy": 0x11010000,
        "zstd": 0x12010000,
        "deflate": 0x13010000,
        "gdeflate": 0x14010000,
        "ans": 0x15010000,
        "bitcomp": 0x16010000,
        "cascaded": 0x17010000,
    }
    assert [codec.from_parameters({}).spec for codec in GENERAL_CODECS] == [codec.name for codec in GENERAL_CODECS]
    assert [Zstd.from_parameters({"level": level}).spec for level in ("01", "22")] == ["zstd", "zstd:level=22"]
    assert Gdeflate.from_parameters({"level": "0"}).spec == "gdeflate:level=0"
    assert all(codec.lossless for codec in GENERAL_CODECS)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (Zstd, "level=23", "expected level=1..22, got level=23. Write zstd, or for example zstd:level=3."),
        (Zstd, "level=-1", "expected level=1..22, got level=-1. Write zstd, or for example zstd:level=3."),
        (Zstd, "rate=8", "expected level=1..22, got rate=8. Write zstd, or for example zstd:level=3."),
        (Deflate, "level=x", "expected level=1..9, got level=x. Write deflate, or for example deflate:level=3."),
        (Lz4, "level=1", "expected no parameters, got level=1. Write lz4."),
        (Ans, "type=f2", "expected no parameters, got type=f2. Write ans."),
    ],
)
def test_invalid_parameters_are_errors(kind: type[GeneralCodec], given: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        kind.from_parameters(dict([given.split("=")]))
    assert str(caught.value) == f"codec {kind.name}: {message}"


@any_format
def test_without_cramjam(kind: type[GeneralCodec], stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cramjam", None)
    with pytest.raises(DeviceError) as caught:
        encode(kind(), np.ones(3), stream)
    assert str(caught.value) == (
        f"codec {kind.name} on the host: expected the package cramjam, "
        "got import of cramjam halted; None in sys.modules. Install it with 'pip install mpi_gpucomp[codecs]'."
    )


@pytest.mark.parametrize("kind", GPU_ONLY, ids=lambda kind: kind.name)
def test_gpu_only_codecs_are_errors_on_the_host(kind: type[GeneralCodec], stream: Stream) -> None:
    message = (
        f"codec {kind.name}: expected a stream of a GPU, got one of the host. "
        f"The codec {kind.name} needs a GPU; lz4, snappy, zstd and deflate run on both."
    )
    with pytest.raises(DeviceError) as caught:
        encode(kind(), np.ones(3), stream)
    assert str(caught.value) == message
    with pytest.raises(DeviceError) as caught:
        decode(kind(), b"x", np.ones(3), stream)
    assert str(caught.value) == message
