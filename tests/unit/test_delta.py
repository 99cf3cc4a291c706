"""The codec delta: bit-exact round trips, and small encodings of small changes."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest
from coding import buffer_in, download, upload
from floats import FLOATS, any_bits, same_bits, special_values
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.codec.delta import Delta
from mpi_gpucomp.errors import BufferSpecError, DecodeError, SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi_gpucomp.device import Buffer, Stream

TYPES = [*FLOATS.values(), np.dtype(np.int64), np.dtype(np.uint16)]
LENGTHS = [1, 31, 32, 33, 1023, 1024, 1025, 5003]
every_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


@contextmanager
def delta_codec(values: np.ndarray, base: np.ndarray, stream: Stream) -> Iterator[tuple[Delta, Buffer]]:
    """Upload values and their base, and create a codec for them."""
    with upload(values, stream) as memory, upload(base, stream) as before:
        buffer = buffer_in(memory, values)
        yield Delta(buffer, before), buffer


def encode(values: np.ndarray, base: np.ndarray, stream: Stream, start: int = 0, count: int | None = None) -> bytes:
    with delta_codec(values, base, stream) as (codec, buffer):
        part = buffer.slice(start, values.size - start if count is None else count)
        with stream.device.alloc(codec.max_encoded(part.count, part.dtype)) as room:
            size = codec.encode(part, room, stream).result()
            assert size is not None
            return download(room.address, size, stream)


def decode(data: bytes, base: np.ndarray, stream: Stream) -> np.ndarray:
    """Decode into memory with other contents."""
    with delta_codec(np.full_like(base, 3), base, stream) as (codec, buffer), upload(data, stream) as source:
        assert codec.decode(source, len(data), buffer, stream).result() == len(data)
        return np.frombuffer(download(buffer.address, buffer.nbytes, stream), base.dtype)


def reference(values: np.ndarray, base: np.ndarray) -> bytes:
    """Encode as documented in kernels/delta.cu, bit by bit."""
    bits = 8 * values.itemsize
    difference = (values.view(f"u{values.itemsize}") - base.view(f"u{values.itemsize}")).view(f"i{values.itemsize}")
    codes = [(int(x) << 1 ^ int(x) >> (bits - 1)) & ((1 << bits) - 1) for x in difference]
    tiles = []
    for tile in range(0, len(codes), 1024):
        widths, planes = bytearray(32), bytearray()
        for block in range(32):
            some = codes[tile : tile + 1024][32 * block : 32 * block + 32]
            widths[block] = max((code.bit_length() for code in some), default=0)
            for plane in range(widths[block]):
                planes += sum((code >> plane & 1) << lane for lane, code in enumerate(some)).to_bytes(4, "little")
        tiles.append(bytes(widths + planes))
    sizes = b"".join(len(tile).to_bytes(4, "little") for tile in tiles)
    return sizes + bytes(-len(sizes) % 8) + b"".join(tiles)


def stepped(dtype: np.dtype, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return weights, and their values one training step before."""
    random = np.random.default_rng(1)
    base = random.normal(0, 1000, count)
    return (base * (1 + random.normal(0, 1e-3, count))).astype(dtype), base.astype(dtype)


@every_type
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_round_trips(dtype: np.dtype, length: int, stream: Stream) -> None:
    for values, base in ((any_bits(dtype, length, 1), any_bits(dtype, length, 2)), stepped(dtype, length)):
        data = encode(values, base, stream)
        assert data == reference(values, base)
        assert same_bits(decode(data, base, stream), values)


@pytest.mark.parametrize("dtype", list(FLOATS.values()), ids=str)
def test_special_values_round_trip(dtype: np.dtype, stream: Stream) -> None:
    special = special_values(dtype)
    before, after = np.repeat(special, special.size), np.tile(special, special.size)
    assert same_bits(decode(encode(after, before, stream), before, stream), after)


@settings(max_examples=60)
@given(one=st.binary(min_size=8, max_size=400), two=st.binary(min_size=8, max_size=400), dtype=st.sampled_from(TYPES))
def test_any_bytes_round_trip(one: bytes, two: bytes, dtype: np.dtype, stream: Stream) -> None:
    nbytes = min(len(one), len(two)) // 8 * 8
    values, base = np.frombuffer(one[:nbytes] * 5, dtype), np.frombuffer(two[:nbytes] * 5, dtype)
    assert same_bits(decode(encode(values, base, stream), base, stream), values)


def test_a_slice_uses_its_part_of_the_base(stream: Stream) -> None:
    values, base = stepped(np.dtype(np.float32), 9000)
    data = encode(values, base, stream, 2048, 3000)
    assert data == reference(values[2048:5048], base[2048:5048])
    assert len(data) < 0.7 * 4 * 3000


def test_unchanged_values_take_only_headers(stream: Stream) -> None:
    values = any_bits(np.dtype(np.float32), 1 << 16)
    assert len(encode(values, values, stream)) == 64 * (32 + 4)


def test_slices_of_other_buffers_are_errors(stream: Stream) -> None:
    values, base = stepped(np.dtype(np.float32), 100)
    with delta_codec(values, base, stream) as (codec, buffer), upload(values, stream) as elsewhere:
        other = buffer_in(elsewhere, values)
        with (
            stream.device.alloc(codec.max_encoded(100, buffer.dtype)) as room,
            pytest.raises(BufferSpecError) as caught,
        ):
            codec.encode(other, room, stream)
    assert str(caught.value) == (
        f"codec delta: expected a slice of the buffer that the codec was created for, got {other!r}. "
        "Pass the same contiguous buffer in every call."
    )


@pytest.mark.parametrize(("changed", "chosen"), [(1e-4, "delta"), (10.0, "split")])
def test_split_is_chosen_if_everything_has_changed(changed: float, chosen: str, stream: Stream) -> None:
    random = np.random.default_rng(3)
    base = random.normal(0, 1, 50_000).astype(np.float32)
    values = base + random.normal(0, changed, base.size).astype(np.float32)
    with delta_codec(values, base, stream) as (codec, buffer):
        choosing = codec.choose(buffer, stream)
        try:
            while True:
                next(choosing)
        except StopIteration as end:
            found = end.value
        assert found.spec == chosen
        assert codec.decoder(found.wire_id) is found
        assert codec.max_encoded(50_000, buffer.dtype) >= found.max_encoded(50_000, buffer.dtype)


def test_delta_is_not_available_by_spec():
    with pytest.raises(SpecError) as caught:
        get_codec("delta")
    assert str(caught.value).endswith(
        "got 'delta'. delta keeps state between calls: pass it to Bcast_init, or to the syncs of mpi_gpucomp.torch."
    )


def test_reductions_are_errors(stream: Stream) -> None:
    values, base = stepped(np.dtype(np.float32), 100)
    with (
        delta_codec(values, base, stream) as (codec, buffer),
        upload(b"1234", stream) as source,
        pytest.raises(BufferSpecError) as caught,
    ):
        codec.decode_reduce(source, 4, buffer, "sum", stream)
    assert str(caught.value) == (
        "codec delta: expected the operation replace, got sum. Choose another codec for reductions."
    )


@every_type
def test_damaged_bytes_raise_or_decode_and_never_crash(dtype: np.dtype, stream: Stream) -> None:
    values, base = stepped(dtype, 3000)
    data, random = encode(values, base, stream), np.random.default_rng(2)
    sizes_and_widths = [*range(12), *range(16, 48)]  # of three tiles, and of the first
    for place in [*sizes_and_widths, *random.integers(48, len(data), 50)]:
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(random.integers(8))
        if place in sizes_and_widths:
            with pytest.raises(DecodeError):
                decode(bytes(damaged), base, stream)
        else:
            with suppress(DecodeError):
                decode(bytes(damaged), base, stream)
    for length in (0, 4, 15, 40, len(data) - 4):
        with pytest.raises(DecodeError):
            decode(data[:length], base, stream)
