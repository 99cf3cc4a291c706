"""The general codecs on the host with damaged and random bytes: an error, and no write outside the buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from coding import decode, encode, upload, values
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpi_gpucomp.codec.general import GENERAL_CODECS, Lz4
from mpi_gpucomp.device import as_buffer, get_device
from mpi_gpucomp.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi_gpucomp.codec.general import GeneralCodec
    from mpi_gpucomp.device import Stream

pytest.importorskip("cramjam")

GUARD = 64
REMEDY = "The bytes were damaged or truncated in transit, or written by another codec."

HOST = [codec for codec in GENERAL_CODECS if codec.format.standard]
any_format = pytest.mark.parametrize("kind", HOST, ids=lambda kind: kind.name)


@pytest.fixture(scope="module")
def stream() -> Iterator[Stream]:
    stream = get_device("host").stream()
    yield stream
    stream.close()


def try_to_decode(codec: GeneralCodec, data: bytes, count: int, stream: Stream) -> bool:
    """Decode arbitrary bytes into a buffer with a guard behind it; return True on success."""
    target = np.full(count + GUARD, 7, np.uint8)
    try:
        decode(codec, data, target, stream, count=count)
    except DecodeError as error:
        assert error.remedy == REMEDY
        return False
    finally:
        assert (target[count:] == 7).all()
    return True


@any_format
def test_every_truncation_is_an_error(kind: type[GeneralCodec], stream: Stream) -> None:
    data = encode(kind(), values("uint8", 300), stream)
    assert try_to_decode(kind(), data, 300, stream)
    assert not any(try_to_decode(kind(), data[:cut], 300, stream) for cut in range(len(data)))


@any_format
@settings(max_examples=150)
@given(seed=st.integers(0, 9), at=st.integers(0, 10**6), flip=st.integers(1, 255), count=st.integers(1, 600))
def test_damaged_bytes_stay_within_the_buffer(
    kind: type[GeneralCodec], seed: int, at: int, flip: int, count: int
) -> None:
    stream = get_device("host").stream(inline=True)
    data = bytearray(encode(kind(), values("uint8", 400, seed), stream))
    data[at % len(data)] ^= flip
    try_to_decode(kind(), bytes(data), count, stream)


@any_format
@settings(max_examples=150)
@given(data=st.binary(min_size=1, max_size=300), count=st.integers(1, 5000))
@example(data=b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8 + b"\x01\x00\x00", count=100)
@example(data=b"\xff\xff\xff\xff\x0f" + b"\xfc\xff\xff\xff\xff", count=100)
@example(data=b"\xff" * 200, count=100)
def test_random_bytes_stay_within_the_buffer(kind: type[GeneralCodec], data: bytes, count: int) -> None:
    try_to_decode(kind(), data, count, get_device("host").stream(inline=True))


@any_format
def test_a_decompression_bomb_is_stopped_at_the_end_of_the_buffer(kind: type[GeneralCodec], stream: Stream) -> None:
    data = encode(kind(), np.zeros(1 << 22, np.uint8), stream)
    assert not try_to_decode(kind(), data[:1000], 900, stream)
    assert not try_to_decode(kind(), data, 1 << 20, stream)


@any_format
def test_fewer_elements_than_expected(kind: type[GeneralCodec], stream: Stream) -> None:
    data = encode(kind(), np.ones(50, np.float64), stream)
    with pytest.raises(DecodeError) as caught:
        decode(kind(), data, np.empty(51, np.float64), stream)
    name = kind.name
    assert str(caught.value) == f"codec {name}: expected a {name} stream of 408 decoded bytes, got one of 400. {REMEDY}"


@pytest.mark.parametrize(("data", "count"), [(b"", 3), (b"\x00", 0), (b"\x00" * 200, 3)])
def test_impossible_lengths_are_errors(data: bytes, count: int, stream: Stream) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(Lz4(), data, np.empty(count, np.float32), stream)
    expected = f"codec lz4: expected a lz4 stream of {4 * count} decoded bytes, got {len(data)} bytes. {REMEDY}"
    assert str(caught.value) == expected


def test_more_bytes_than_the_memory_holds(stream: Stream) -> None:
    pending = Lz4().decode(upload(b"x" * 9, stream), 10, as_buffer(np.empty(30, np.uint8)), stream)
    with pytest.raises(DecodeError, match=r"^codec lz4: expected a lz4 stream of 30 decoded bytes, got 10 bytes\."):
        pending.result()


@any_format
def test_damaged_bytes_are_not_reduced_and_do_not_affect_later_work(kind: type[GeneralCodec], stream: Stream) -> None:
    arriving = values("float32", 5000)
    data = encode(kind(), arriving, stream)
    here, there = np.ones_like(arriving), np.ones_like(arriving)
    in_use = get_device("host").pool.statistics.in_use
    with upload(data[: len(data) // 2], stream) as half, upload(data, stream) as whole:
        bad = kind().decode_reduce(half, half.nbytes, as_buffer(here), "sum", stream)
        good = kind().decode_reduce(whole, whole.nbytes, as_buffer(there), "sum", stream)
        assert good.result() == there.nbytes
        with pytest.raises(DecodeError):
            bad.result()
    assert (here == 1).all()
    assert (there == 1 + arriving).all()
    assert get_device("host").pool.statistics.in_use == in_use
