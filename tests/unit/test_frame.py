"""Frames: the bytes of the header, agreement of sender and receiver, and damage of every kind."""

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

DAMAGED = "The frame was damaged or cut short on its way, or something else wrote to this buffer."
AGREE = "Pass the same codec, type and count on every rank."
FLOAT32 = dtype_of_name("float32")


def smooth(count: int = 1000) -> np.ndarray:
    return np.sin(np.arange(count) * 1e-3).astype(np.float32)


def framed(spec: str, values: np.ndarray, stream: Stream, sequence: int = 7, **options: bool) -> bytes:
    codec = get_codec(spec)
    with upload(values, stream) as memory:
        source = buffer_in(memory, values)
        with stream.device.alloc(frame.room(codec, source.count, source.dtype)) as to:
            size = frame.encode(codec, source, to, sequence, stream, **options).result()
            return download(to.address, size, stream)


def opened(spec: str, data: bytes, to: np.ndarray, stream: Stream, op: str = "replace", **expect: object) -> int:
    with upload(data, stream) as source, upload(to, stream) as memory:
        try:
            header = frame.read_header(source, stream)
            target = buffer_in(memory, to)
            return frame.decode(get_codec(spec), header, source, target, stream, op=op, **expect).result()
        finally:
            to.view(np.uint8)[:] = np.frombuffer(download(memory.address, to.nbytes, stream), np.uint8)


@pytest.fixture
def stream(device):
    made = device.stream()
    yield made
    made.close()


def test_header_bytes_are_those_of_the_layout():
    header = frame.FrameHeader(0x04010000, FLOAT32, sequence=5, plain=4000, encoded=321)
    golden = "4750434601020b0000000104000000000500000000000000a00f000000000000"
    assert header.pack().hex() == golden + "4101000000000000" + "00" * 8
    assert frame.parse(header.pack()) == header
    assert frame.HEADER_BYTES == 48 and frame.HEADER_BYTES % 16 == 0


@given(
    wire_id=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPES),
    sequence=st.integers(0, 2**64 - 1),
    count=st.integers(0, 2**40),
    encoded=st.integers(0, 2**63),
    checked=st.booleans(),
    payload=st.integers(0, 2**32 - 1),
)
def test_headers_survive_the_way_to_bytes_and_back(wire_id, dtype, sequence, count, encoded, checked, payload):
    header = frame.FrameHeader(wire_id, dtype, sequence, count * dtype.itemsize, encoded, False, checked)
    header = header.sealed(payload) if checked else header
    assert frame.parse(header.pack()) == header


@given(st.binary(max_size=5000))
def test_checksum_is_zlibs_of_header_and_payload(payload):
    header = frame.FrameHeader(1, DTYPES[0], 2, len(payload), len(payload))
    assert header.sealed(zlib.adler32(payload)).checksum == zlib.adler32(header.pack() + payload)


@pytest.mark.parametrize("spec", ["none", "split", "mpc", "zfp:rate=8", "bound:abs=1e-3", "cast:bf16"])
@pytest.mark.parametrize("count", [0, 1, 1000, 100_000])
@pytest.mark.parametrize("checked", [True, False])
def test_frames_carry_what_the_codec_carries(stream, spec, count, checked):
    values, back = smooth(count), np.full(count, 9, np.float32)
    data = framed(spec, values, stream, checked=checked)
    opened(spec, data, back, stream, sequence=7)
    if get_codec(spec).lossless:
        assert back.tobytes() == values.tobytes()
    else:
        np.testing.assert_allclose(back, values, atol=1e-2)
    header = frame.parse(data)
    assert (header.plain, header.encoded, header.checked) == (4 * count, len(data) - 48, checked)
    assert header.checksum == (zlib.adler32(data[:12] + bytes(4) + data[16:]) if checked else 0)


def test_a_chunk_that_does_not_shrink_travels_raw(stream):
    noise = np.random.default_rng(1).integers(0, 256, 4000, np.uint8).view(np.float32)
    data = framed("mpc", noise, stream)
    assert frame.parse(data).raw and data[48:] == noise.tobytes()
    back = np.zeros_like(noise)
    opened("mpc", data, back, stream)
    assert back.tobytes() == noise.tobytes()


def test_a_chunk_that_the_codec_cannot_hold_travels_raw(stream):
    values = smooth()
    values[3] = np.nan
    data = framed("zfp:rate=8", values, stream)
    assert frame.parse(data).raw and data[48:] == values.tobytes()


@pytest.mark.parametrize("raw", [False, True])
def test_a_reduction_takes_the_decoded_values(stream, raw):
    values = smooth()
    values[3] = np.inf if raw else 0
    back = np.ones_like(values)
    opened("zfp:rate=32", framed("zfp:rate=32", values, stream), back, stream, op="sum")
    np.testing.assert_allclose(back, values + 1, atol=1e-6)


def refused(data: bytes, **changes: object) -> str:
    with pytest.raises(FrameError) as caught:
        frame.parse(data, where="chunk 3 from rank 2")
    return str(caught.value)


def header_with(offset: int, form: str, value: object) -> bytes:
    data = bytearray(frame.FrameHeader(1, FLOAT32, 0, 400, 10, raw=False).pack())
    struct.pack_into(form, data, offset, value)
    return bytes(data)


def test_headers_that_are_none_are_refused_in_words():
    where = "chunk 3 from rank 2: expected"
    assert refused(b"GPCF") == f"{where} a header of 48 bytes, got 4 bytes. {DAMAGED}"
    assert refused(header_with(0, "4s", b"HTTP")) == f"{where} the magic bytes 47504346, got 48545450. {DAMAGED}"
    release = "Run the same release on every rank."
    assert refused(header_with(4, "B", 9)) == f"{where} version 1, got version 9. {release}"
    known = f"{where} known flags, an element type and zeros"
    assert refused(header_with(5, "B", 0x82)) == f"{known}, got 01820b00 and 0000000000000000. {DAMAGED}"
    assert refused(header_with(6, "B", 99)) == f"{known}, got 01026300 and 0000000000000000. {DAMAGED}"
    assert refused(header_with(40, "Q", 1)) == f"{known}, got 01020b00 and 0100000000000000. {DAMAGED}"
    lengths = f"{where} lengths that fit float32 elements"
    assert refused(header_with(24, "Q", 401)) == f"{lengths}, got 401 plain and 10 encoded bytes. {DAMAGED}"
    assert refused(header_with(5, "B", 3)) == f"{lengths}, got 400 plain and 10 encoded bytes. {DAMAGED}"


def test_receivers_that_expect_something_else_say_so(stream):
    data, back = framed("split", smooth(), stream), np.zeros(1000, np.float32)

    def complaint(spec: str, to: np.ndarray, data: bytes = data, **expect: object) -> str:
        with pytest.raises(FrameError) as caught:
            opened(spec, data, to, stream, where="frame from rank 1", **expect)
        return str(caught.value)

    start = "frame from rank 1: expected"
    assert complaint("mpc", back) == f"{start} codec mpc (wire id 0x2010001), got wire id 0x4010000. {AGREE}"
    assert complaint("split", back[:10].copy()) == f"{start} 40 bytes of float32, got 4000 bytes of float32. {AGREE}"
    wide = back.astype(np.float64)[:500]
    assert complaint("split", wide) == f"{start} 4000 bytes of float64, got 4000 bytes of float32. {AGREE}"
    assert complaint("split", back, sequence=8) == f"{start} chunk 8, got chunk 7. {DAMAGED}"
    cut = complaint("split", back, data[:-5])
    assert cut == f"{start} {len(data)} bytes, got {len(data) - 5}. {DAMAGED}"
    assert not back.any()


@pytest.mark.parametrize("op", ["replace", "sum"])
def test_every_flipped_bit_is_found(stream, op):
    data = framed("bound:abs=1e-3", smooth(64), stream)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        back = np.ones(64, np.float32)
        with pytest.raises(FrameError):
            opened("bound:abs=1e-3", bytes(damaged), back, stream, op=op)
        assert op == "replace" or (back == 1).all(), "a damaged frame was reduced"


def test_memory_goes_back_to_the_pool(host):
    stream = host.stream()
    values = smooth()
    for _ in range(3):
        framed("split", values, stream)
    before = host.pool.statistics
    for _ in range(20):
        framed("split", values, stream)
    after = host.pool.statistics
    stream.close()
    assert after.allocations == before.allocations
    assert after.in_use == before.in_use


def test_parts_of_memory_keep_the_whole_alive(host):
    whole = host.alloc(100)
    part = whole.part(10, 20)
    assert isinstance(part, Memory) and (part.address, part.nbytes) == (whole.address + 10, 20)
    part.release()
    ctypes.memset(part.address, 1, part.nbytes)
    assert part.owner is whole
    whole.release()
