"""The kernel decoders with damaged and random bytes: an error or values, and no access outside the buffer."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import pytest
from coding import decode, encode, upload
from floats import FLOATS, decoded, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.device import Buffer, dtype_of_name, get_device
from mpi_gpucomp.errors import DecodeError

if TYPE_CHECKING:
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.device import Stream

GUARD = 256
REMEDY = "The bytes were damaged or truncated in transit, or written by another codec."
SPECS = ["none", "zfp:rate=7.5", "mpc:stride=3", "split", "bound:abs=0.001", "cast:bf16", "cast:f16", "cast:f32"]
KINDS = [(spec, name) for spec in SPECS for name in get_codec(spec).dtypes if name in FLOATS]
every_kind = pytest.mark.parametrize(("spec", "name"), KINDS)
tiled_kinds = pytest.mark.parametrize(("spec", "name"), [k for k in KINDS if k[0].startswith(("mpc", "split", "bou"))])


def weights(name: str, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, count).astype(FLOATS[name])


def try_to_decode(codec: Codec, data: bytes, name: str, count: int, stream: Stream, op: str = "replace") -> str:
    """Decode arbitrary bytes between two guards, which must not change; return the `got` of the error, if any."""
    dtype = dtype_of_name(name)
    assert dtype is not None
    guarded = np.full(2 * GUARD + count * dtype.itemsize, 7, np.uint8)
    with upload(data, stream) as source, upload(guarded, stream) as memory:
        to = Buffer(memory.address + GUARD, dtype, (count,), device=memory.device.name)
        got = ""
        try:
            assert codec.decode_reduce(source, len(data), to, op, stream).result() == len(data)
        except DecodeError as error:
            assert (error.topic, error.remedy) == (f"codec {codec.spec}", REMEDY)
            assert error.expected == f"an encoding of {count} elements"
            got = error.got
        stream.copy(guarded.ctypes.data, memory.address, guarded.nbytes)
        stream.synchronize()
    assert (guarded[:GUARD] == 7).all() and (guarded[-GUARD:] == 7).all()
    return got


@every_kind
@pytest.mark.parametrize("count", [1, 100, 2500])
def test_every_other_length_is_an_error(spec: str, name: str, count: int, stream: Stream) -> None:
    codec = get_codec(spec)
    data = encode(codec, weights(name, count), stream)
    assert try_to_decode(codec, data, name, count, stream) == ""
    for size in {0, 1, 4, 8, 15, 16, 24, len(data) // 2, len(data) - 4, len(data) - 1} & set(range(len(data))):
        assert try_to_decode(codec, data[:size], name, count, stream)
    for more in (1, 4, 8, 1000):
        assert try_to_decode(codec, data + bytes(more), name, count, stream)


@every_kind
def test_another_number_of_elements_is_an_error(spec: str, name: str, stream: Stream) -> None:
    codec = get_codec(spec)
    data = encode(codec, weights(name, 2000), stream)
    for count in (0, 1, 900, 3100):
        assert try_to_decode(codec, data, name, count, stream)


@every_kind
@settings(max_examples=40)
@given(places=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4), op=st.booleans())
def test_damaged_bytes_stay_within_the_buffer(
    spec: str, name: str, places: list[tuple[int, int]], op: bool, stream: Stream
) -> None:
    codec = get_codec(spec)
    data = bytearray(encode(codec, weights(name, 1500), stream))
    for place, flip in places:
        data[place % len(data)] ^= flip
    try_to_decode(codec, bytes(data), name, 1500, stream, "sum" if op else "replace")


@tiled_kinds
def test_flipped_bits_at_the_start_never_reaches_beyond(spec: str, name: str, stream: Stream) -> None:
    codec = get_codec(spec)
    data = encode(codec, weights(name, 1100), stream)
    for place in range(8 * min(len(data), 96)):
        broken = bytearray(data)
        broken[place // 8] ^= 1 << place % 8
        try_to_decode(codec, bytes(broken), name, 1100, stream)


@every_kind
@settings(max_examples=40)
@given(data=st.binary(max_size=400), count=st.integers(0, 5000))
def test_random_bytes_stay_within_the_buffer(spec: str, name: str, data: bytes, count: int, stream: Stream) -> None:
    try_to_decode(get_codec(spec), data, name, count, stream)


@tiled_kinds
@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 32), byte=st.integers(0, 255))
def test_random_tiles_of_valid_sizes_stay_within_the_buffer(
    spec: str, name: str, seed: int, byte: int, stream: Stream
) -> None:
    """Keep sizes and table, and replace everything behind them by noise or one value."""
    codec = get_codec(spec)
    data = encode(codec, weights(name, 1500, seed % 7), stream)
    start = 8 * (-(-len(data) // 8) // 8)
    noise = np.random.default_rng(seed).bytes(len(data) - start) if seed % 2 else bytes([byte]) * (len(data) - start)
    try_to_decode(codec, data[:start] + noise, name, 1500, stream)


MESSAGES = {
    ("none", "float32"): "396 bytes instead of 400",
    ("zfp:rate=7.5", "float32"): "92 bytes instead of 96",
    ("cast:bf16", "float32"): "196 bytes instead of 200",
    ("mpc:stride=3", "float32"): "invalid bytes",
    ("split", "float32"): "invalid bytes",
    ("bound:abs=0.001", "float32"): "invalid bytes",
}


@pytest.mark.parametrize(("kind", "got"), MESSAGES.items(), ids=str)
def test_the_error_in_full(kind: tuple[str, str], got: str, stream: Stream) -> None:
    codec, array = get_codec(kind[0]), weights(kind[1], 100)
    data = encode(codec, array, stream)
    with pytest.raises(DecodeError) as caught:
        decode(codec, data[:-4], array, stream)
    assert str(caught.value) == f"codec {kind[0]}: expected an encoding of 100 elements, got {got}. {REMEDY}"


@tiled_kinds
def test_fewer_bytes_than_the_size_table(spec: str, name: str, stream: Stream) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(get_codec(spec), b"1234567", weights(name, 5000), stream)
    assert str(caught.value) == f"codec {spec}: expected an encoding of 5000 elements, got 7 bytes. {REMEDY}"


@every_kind
def test_more_bytes_than_the_memory_holds(spec: str, name: str, stream: Stream) -> None:
    array = weights(name, 10)
    with upload(array, stream) as memory, pytest.raises(DecodeError) as caught:
        to = Buffer(memory.address, dtype_of_name(name), (10,), device=memory.device.name)  # type: ignore[arg-type]
        get_codec(spec).decode(memory.part(0, 9), 10, to, stream)
    assert str(caught.value) == f"codec {spec}: expected an encoding of 10 elements, got 9 of 10 bytes. {REMEDY}"


@tiled_kinds
def test_damaged_bytes_do_not_affect_later_work(spec: str, name: str) -> None:
    host, array = get_device("host"), weights(name, 5000)
    stream, codec = host.stream(), get_codec(spec)
    data = encode(codec, array, stream)
    expected = decoded(codec, data, array, stream)
    in_use = host.pool.statistics.in_use  # type: ignore[attr-defined]
    with upload(data[:-4], stream) as cut, upload(data, stream) as whole, upload(array, stream) as memory:
        to = Buffer(memory.address, dtype_of_name(name), (5000,))  # type: ignore[arg-type]
        bad, good = codec.decode(cut, cut.nbytes, to, stream), codec.decode(whole, whole.nbytes, to, stream)
        assert good.result() == len(data)
        with pytest.raises(DecodeError):
            bad.result()
        back = np.empty_like(array)
        stream.copy(back.ctypes.data, memory.address, back.nbytes)
        stream.synchronize()
    assert same_bits(back, expected)
    assert host.pool.statistics.in_use == in_use  # type: ignore[attr-defined]
    stream.close()


@tiled_kinds
def test_a_result_does_not_change_when_its_memory_is_reused(spec: str, name: str, stream: Stream) -> None:
    codec, array = get_codec(spec), weights(name, 2000)
    data = encode(codec, array, stream)[:-4]
    with upload(data, stream) as source, upload(array, stream) as memory:
        to = Buffer(memory.address, dtype_of_name(name), (2000,), device=memory.device.name)  # type: ignore[arg-type]
        bad = codec.decode(source, len(data), to, stream)
        with pytest.raises(DecodeError) as first:
            bad.result()
        others = [stream.device.pinned(16) for _ in range(20)]
        for other in others:
            ctypes.memset(other.address, 0, 16)
        with pytest.raises(DecodeError) as second:
            bad.result()
        assert str(second.value) == str(first.value) and bad.done()
        for other in others:
            other.release()
