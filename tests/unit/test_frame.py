"""Frames: the header's bytes, agreement between sender and receiver, and detection of damage."""

from __future__ import annotations

import ctypes
import struct
import zlib

import numpy as np
import pytest
from coding import buffer_in, download, upload
from hypothesis import given
from hypothesis import strategies as st

from mpi_gpucomp.codec import frame, get_codec
from mpi_gpucomp.device import DTYPES, Memory, Stream, dtype_of_name
from mpi_gpucomp.errors import FrameError

DAMAGED = "The frame was damaged or truncated in transit, or the buffer was overwritten."
REMEDY = "Pass the same codec, type and count on every rank."
FLOAT32 = dtype_of_name("float32")


def smooth(count: int = 1000) -> np.ndarray:
    return np.sin(np.arange(count) * 1e-3).astype(np.float32)


def encode_frame(spec: str, values: np.ndarray, stream: Stream, sequence: int = 7, **options: bool) -> bytes:
    codec = get_codec(spec)
    with upload(values, stream) as memory:
        source = buffer_in(memory, values)
        with stream.device.alloc(frame.max_frame_bytes(codec, source.count, source.dtype)) as to:
            size = frame.encode(codec, source, to, sequence, stream, **options).result()
            return download(to.address, size, stream)


def decode_frame(spec: str, data: bytes, to: np.ndarray, stream: Stream, op: str = "replace", **expect: object) -> int:
    with upload(data, stream) as source, upload(to, stream) as memory:
        try:
            header = frame.read_header(source, stream)
            target = buffer_in(memory, to)
            return frame.decode(get_codec(spec), header, source, target, stream, op=op, **expect).result()
        finally:
            to.view(np.uint8)[:] = np.frombuffer(download(memory.address, to.nbytes, stream), np.uint8)


@pytest.fixture
def stream(device):
    opened = device.stream()
    yield opened
    opened.close()


def test_header_bytes_match_the_documented_layout():
    header = frame.FrameHeader(0x04010000, FLOAT32, sequence=5, decoded_bytes=4000, payload_bytes=321)
    golden = "4750434601020b0000000104000000000500000000000000a00f000000000000"
    assert header.pack().hex() == golden + "4101000000000000" + "00" * 8
    assert frame.parse(header.pack()) == header
    assert frame.HEADER_BYTES == 48 and frame.HEADER_BYTES % 16 == 0


@given(
    wire_id=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPES),
    sequence=st.integers(0, 2**64 - 1),
    count=st.integers(0, 2**40),
    payload_bytes=st.integers(0, 2**63),
    checked=st.booleans(),
    adler=st.integers(0, 2**32 - 1),
)
def test_headers_round_trip(wire_id, dtype, sequence, count, payload_bytes, checked, adler):
    header = frame.FrameHeader(wire_id, dtype, sequence, count * dtype.itemsize, payload_bytes, False, checked)
    header = header.with_checksum(adler) if checked else header
    assert frame.parse(header.pack()) == header


@given(st.binary(max_size=5000))
def test_the_checksum_is_the_adler32_of_header_and_payload(payload):
    header = frame.FrameHeader(1, DTYPES[0], 2, len(payload), len(payload))
    assert header.with_checksum(zlib.adler32(payload)).checksum == zlib.adler32(header.pack() + payload)


@pytest.mark.parametrize("spec", ["none", "split", "mpc", "zfp:rate=8", "bound:abs=1e-3", "cast:bf16"])
@pytest.mark.parametrize("count", [0, 1, 1000, 100_000])
@pytest.mark.parametrize("checked", [True, False])
def test_frames_round_trip(stream, spec, count, checked):
    values, back = smooth(count), np.full(count, 9, np.float32)
    data = encode_frame(spec, values, stream, checked=checked)
    decode_frame(spec, data, back, stream, sequence=7)
    if get_codec(spec).lossless:
        assert back.tobytes() == values.tobytes()
    else:
        np.testing.assert_allclose(back, values, atol=1e-2)
    header = frame.parse(data)
    assert (header.decoded_bytes, header.payload_bytes, header.checked) == (4 * count, len(data) - 48, checked)
    assert header.checksum == (zlib.adler32(data[:12] + bytes(4) + data[16:]) if checked else 0)


def test_a_chunk_that_does_not_shrink_is_sent_raw(stream):
    noise = np.random.default_rng(1).integers(0, 256, 4000, np.uint8).view(np.float32)
    data = encode_frame("mpc", noise, stream)
    assert frame.parse(data).raw and data[48:] == noise.tobytes()
    back = np.zeros_like(noise)
    decode_frame("mpc", data, back, stream)
    assert back.tobytes() == noise.tobytes()


def test_a_chunk_that_the_codec_cannot_represent_is_sent_raw(stream):
    values = smooth()
    values[3] = np.nan
    data = encode_frame("zfp:rate=8", values, stream)
    assert frame.parse(data).raw and data[48:] == values.tobytes()


@pytest.mark.parametrize("raw", [False, True])
def test_decoding_reduces_into_the_buffer(stream, raw):
    values = smooth()
    values[3] = np.inf if raw else 0
    back = np.ones_like(values)
    decode_frame("zfp:rate=32", encode_frame("zfp:rate=32", values, stream), back, stream, op="sum")
    np.testing.assert_allclose(back, values + 1, atol=1e-6)


def parse_error(data: bytes) -> str:
    with pytest.raises(FrameError) as caught:
        frame.parse(data, where="chunk 3 from rank 2")
    return str(caught.value)


def header_with(offset: int, field_format: str, value: object) -> bytes:
    data = bytearray(frame.FrameHeader(1, FLOAT32, 0, 400, 10, raw=False).pack())
    struct.pack_into(field_format, data, offset, value)
    return bytes(data)


def test_invalid_headers_are_errors():
    where = "chunk 3 from rank 2: expected"
    assert parse_error(b"GPCF") == f"{where} a header of 48 bytes, got 4 bytes. {DAMAGED}"
    assert parse_error(header_with(0, "4s", b"HTTP")) == f"{where} the magic bytes 47504346, got 48545450. {DAMAGED}"
    release = "Run the same release on every rank."
    assert parse_error(header_with(4, "B", 9)) == f"{where} version 1, got version 9. {release}"
    known = f"{where} known flags, an element type and zeros"
    assert parse_error(header_with(5, "B", 0x82)) == f"{known}, got 01820b00 and 0000000000000000. {DAMAGED}"
    assert parse_error(header_with(6, "B", 99)) == f"{known}, got 01026300 and 0000000000000000. {DAMAGED}"
    assert parse_error(header_with(40, "Q", 1)) == f"{known}, got 01020b00 and 0100000000000000. {DAMAGED}"
    multiple = f"{where} a multiple of 4 bytes for float32 elements, got 401 decoded bytes. {DAMAGED}"
    assert parse_error(header_with(24, "Q", 401)) == multiple
    assert parse_error(header_with(5, "B", 3)) == f"{where} a raw payload of 400 bytes, got 10. {DAMAGED}"


def test_a_frame_that_does_not_match_the_receiver_is_an_error(stream):
    data, back = encode_frame("split", smooth(), stream), np.zeros(1000, np.float32)

    def mismatch(spec: str, to: np.ndarray, data: bytes = data, **expect: object) -> str:
        with pytest.raises(FrameError) as caught:
            decode_frame(spec, data, to, stream, where="frame from rank 1", **expect)
        return str(caught.value)

    start = "frame from rank 1: expected"
    assert mismatch("mpc", back) == f"{start} codec mpc (wire id 0x2010001), got wire id 0x4020000. {REMEDY}"
    assert mismatch("split", back[:10].copy()) == f"{start} 40 bytes of float32, got 4000 bytes of float32. {REMEDY}"
    wide = back.astype(np.float64)[:500]
    assert mismatch("split", wide) == f"{start} 4000 bytes of float64, got 4000 bytes of float32. {REMEDY}"
    assert mismatch("split", back, sequence=8) == f"{start} chunk 8, got chunk 7. {DAMAGED}"
    truncated = mismatch("split", back, data[:-5])
    assert truncated == f"{start} {len(data)} bytes, got {len(data) - 5}. {DAMAGED}"
    assert not back.any()


@pytest.mark.parametrize("op", ["replace", "sum"])
def test_every_flipped_bit_is_detected(stream, op):
    data = encode_frame("bound:abs=1e-3", smooth(64), stream)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        back = np.ones(64, np.float32)
        with pytest.raises(FrameError):
            decode_frame("bound:abs=1e-3", bytes(damaged), back, stream, op=op)
        assert op == "replace" or (back == 1).all(), "a damaged frame was reduced"


def test_memory_is_returned_to_the_pool(host):
    stream = host.stream()
    values = smooth()
    for _ in range(3):
        encode_frame("split", values, stream)
    before = host.pool.statistics
    for _ in range(20):
        encode_frame("split", values, stream)
    after = host.pool.statistics
    stream.close()
    assert after.allocations == before.allocations
    assert after.in_use == before.in_use


def test_a_part_of_memory_keeps_the_whole_alive(host):
    whole = host.alloc(100)
    part = whole.part(10, 20)
    assert isinstance(part, Memory) and (part.address, part.nbytes) == (whole.address + 10, 20)
    part.release()
    ctypes.memset(part.address, 1, part.nbytes)
    assert part.owner is whole
    whole.release()
