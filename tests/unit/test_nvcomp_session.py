"""nvCOMP sessions without a GPU: our calls, against a fake that enforces nvCOMP's rules.

The fake does not test nvCOMP (test_nvcomp does, on a GPU). It checks that we do not block, keep buffers aligned, pass
the right stream and lengths, and convert errors.
"""

from __future__ import annotations

import gc
import sys
import weakref
import zlib
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from coding import buffer_in, decode, encode, upload, values

from mpi_gpucomp.codec import nvcomp
from mpi_gpucomp.codec.general import (
    _READ,
    _WRITE,
    GENERAL_CODECS,
    Ans,
    Bitcomp,
    Deflate,
    GeneralCodec,
    Lz4,
    Zstd,
    _compress,
    _decompress,
    _view,
)
from mpi_gpucomp.device import DTYPES, Memory, Stream
from mpi_gpucomp.device.host import HostDevice, InlineStream
from mpi_gpucomp.errors import BufferSpecError, DecodeError, DeviceError

cramjam = pytest.importorskip("cramjam")

ALIGNMENTS = {kind.format.algorithm: kind.format.alignment for kind in GENERAL_CODECS}


class Batch:
    """A batch of one; reading its size is what blocks."""

    size_reads = 0

    def __init__(self, sources: list[Any]) -> None:
        (span,) = sources
        interface = span.__cuda_array_interface__
        assert interface["version"] == 3 and interface["stream"] is None and interface["strides"] is None
        self.address, self.element = interface["data"][0], interface["typestr"]
        self.size = interface["shape"][0] * int(self.element[2:])

    @property
    def buffer_sizes(self) -> list[int]:
        Batch.size_reads += 1
        return [self.size]


class FakeCodec:
    """Compresses host memory with cramjam or zlib in place of nvCOMP and GPU memory."""

    opened: ClassVar[list[FakeCodec]] = []

    def __init__(self, **options: Any) -> None:
        self.options, self.configured = options, 0
        self.name = options["algorithm"].lower() if options["bitstream_kind"] == "raw" else "native"
        self.opened.append(self)

    def compression_config(self, sizes: list[int]) -> tuple[str, int]:
        self.configured += 1
        assert min(sizes) > 0
        return "compression", *sizes

    def decompression_config(self, compression_config: tuple[str, int]) -> tuple[str, int]:
        assert compression_config[0] == "compression"
        return "decompression", compression_config[1]

    def encode(self, srcs: Batch, out: Batch, compression_config: tuple[str, int]) -> Batch:
        assert compression_config == ("compression", srcs.size)
        assert srcs.element == self.options.get("data_type", "|u1")
        return self._work(srcs, out, lambda data, to: _compress(cramjam, self.name, 1, data, to), zlib.compress)

    def decode(self, srcs: Batch, out: Batch, decompression_config: tuple[str, int]) -> Batch:
        assert decompression_config == ("decompression", out.size)
        return self._work(srcs, out, lambda data, to: _decompress(cramjam, self.name, data, to), zlib.decompress)

    def _work(self, srcs: Batch, out: Batch, standard: Any, native: Any) -> Batch:
        assert not any(batch.address % ALIGNMENTS[self.options["algorithm"]] for batch in (srcs, out))
        source, to = _view(srcs.address, srcs.size, _READ), _view(out.address, out.size, _WRITE)
        try:
            if self.name == "native":
                result = native(source)
                to[: len(result)] = result
                out.size = len(result)
            else:
                out.size = standard(source, to)
        except (cramjam.DecompressionError, zlib.error) as error:
            raise RuntimeError("nvCOMP error : code=12.") from error
        return out


class FakeStream(InlineStream):
    """A host stream with the handle of a CUDA stream."""

    handle = SimpleNamespace(ptr=0x5EED)

    def run(self, work: Any) -> None:
        work()


class FakeGpu(HostDevice):
    """Host memory under a GPU's name."""

    name = "cuda:3"

    def stream(self, *, inline: bool = False) -> InlineStream:
        return FakeStream(self)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    kinds = SimpleNamespace(RAW="raw", NVCOMP_NATIVE="native")
    package = SimpleNamespace(BitstreamKind=kinds, Codec=FakeCodec, as_arrays=Batch)
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", package)
    monkeypatch.setattr(FakeCodec, "opened", [])
    monkeypatch.setattr(Batch, "size_reads", 0)
    return FakeGpu().stream()


every_format = pytest.mark.parametrize("kind", GENERAL_CODECS, ids=lambda kind: kind.name)


@every_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 5000])
def test_round_trip(kind: type[GeneralCodec], dtype: Any, count: int, stream: Stream) -> None:
    array = values(dtype.name, count)
    back = np.zeros_like(array)
    data = encode(kind(), array, stream)
    assert decode(kind(), data, back, stream) == array.nbytes
    assert back.tobytes() == array.tobytes()


@every_format
def test_unaligned_buffers_are_staged_and_the_memory_is_released(kind: type[GeneralCodec], stream: Stream) -> None:
    array = values("uint8", 3001)
    back, target = np.zeros_like(array), values("uint8", 3001, 1)
    expected = target + array
    data = encode(kind(), array, stream, shift=3)
    decode(kind(), data, back, stream, shift=5)
    decode(kind(), data, target, stream, "sum", shift=7)
    assert (back == array).all() and (target == expected).all()
    assert stream.device.pool.statistics.in_use == 0


def test_a_codec_is_opened_once_per_stream_and_options(stream: Stream) -> None:
    array = values("float32", 100)
    for level in (1, 1, 9):
        encode(Deflate(level), array, stream)
    common = {"algorithm": "Deflate", "device_id": 3, "cuda_stream": 0x5EED, "uncomp_chunk_size": 65536}
    assert [codec.options for codec in FakeCodec.opened] == [
        {**common, "bitstream_kind": "raw", "algorithm_type": 1},
        {**common, "bitstream_kind": "raw", "algorithm_type": 5},
    ]


def test_a_codec_is_dropped_with_its_stream(stream: Stream) -> None:
    other = stream.device.stream()
    encode(Lz4(), values("float32", 100), other)
    codec = weakref.ref(FakeCodec.opened.pop())
    assert codec() is not None
    del other
    gc.collect()
    assert codec() is None


def test_configurations_are_cached_up_to_a_limit(stream: Stream) -> None:
    for count in [5, 6, 5, 6]:
        encode(Bitcomp(), values("int16", count), stream)
    (codec,) = FakeCodec.opened
    assert codec.configured == 2
    for count in range(1, 200):
        encode(Bitcomp(), values("int16", count), stream)
    (session,) = nvcomp._sessions[stream].values()
    assert len(session._configurations) <= nvcomp.MAX_CONFIGURATIONS


def test_sizes_are_read_only_on_request(stream: Stream) -> None:
    array, back = values("float32", 100), np.zeros(100, np.float32)
    source, to = buffer_in(upload(array, stream), array), buffer_in(upload(back, stream), back)
    room = stream.device.alloc(Ans().max_encoded(100, source.dtype))
    encoding = Ans().encode(source, room, stream)
    assert encoding.done() and Batch.size_reads == 0
    size = encoding.result()
    assert size is not None and Batch.size_reads == 1
    decoding = Ans().decode(room, size, to, stream)
    assert decoding.done() and Batch.size_reads == 1


def test_a_buffer_too_long_for_the_format_is_sent_raw(stream: Stream) -> None:
    array = np.zeros(Lz4.format.max_bytes + 1, np.uint8)
    source = buffer_in(upload(array, stream), array)
    room = stream.device.alloc(Lz4().max_encoded(array.size, source.dtype))
    assert Lz4().encode(source, room, stream).result() is None


def test_encoded_bytes_must_be_aligned(stream: Stream) -> None:
    array = values("float32", 10)
    memory = stream.device.alloc(1000)
    room = Memory(memory.address + 2, 900, stream.device, memory)
    with pytest.raises(BufferSpecError) as caught:
        Zstd().encode(buffer_in(upload(array, stream), array), room, stream)
    assert str(caught.value) == (
        f"nvCOMP's Zstd on cuda:3: expected encoded bytes aligned to 8 bytes, got address {room.address:#x}. "
        "Place them at the start of a block from the device's pool."
    )


@every_format
def test_nvcomps_decoding_errors_are_converted(kind: type[GeneralCodec], stream: Stream) -> None:
    array = values("uint8", 500)
    data = encode(kind(), array, stream)
    with pytest.raises(DecodeError) as caught:
        decode(kind(), data[: len(data) // 2], array.copy(), stream)
    name, remedy = kind.name, "The bytes were damaged or truncated in transit, or written by another codec."
    assert str(caught.value) == (
        f"codec {name}: expected a {name} stream of 500 decoded bytes, got nvCOMP error : code=12. {remedy}"
    )
    with pytest.raises(DecodeError, match="stream of 501 decoded bytes, got one of 500"):
        decode(kind(), data, np.zeros(501, np.uint8), stream)


def test_nvcomps_encoding_errors_are_converted(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA Runtime API failure")

    monkeypatch.setattr(FakeCodec, "encode", fail)
    with pytest.raises(DeviceError, match=r"^nvCOMP's ANS on cuda:3: expected a working GPU, got CUDA Runtime"):
        encode(Ans(), values("float32", 10), stream)
