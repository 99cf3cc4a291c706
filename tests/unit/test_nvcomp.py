"""nvCOMP: the calls, limits and bounds that we rely on, against its package; the bytes, on a GPU."""

from __future__ import annotations

import ast
import ctypes
import re
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from coding import buffer_in, decode, encode, upload, values
from hardware import GPU, missing

from mpi_gpucomp.codec import general, nvcomp
from mpi_gpucomp.codec.general import GENERAL_CODECS, Ans, Bitcomp, Cascaded, Deflate, Gdeflate, Lz4, Snappy, Zstd
from mpi_gpucomp.device import DTYPES, dtype_of_name, get_device
from mpi_gpucomp.errors import DeviceError

if TYPE_CHECKING:
    from mpi_gpucomp.codec.general import GeneralCodec
    from mpi_gpucomp.device import Stream

library = pytest.importorskip("nvidia.nvcomp", reason="nvCOMP is not installed")
libnvcomp = pytest.importorskip("nvidia.libnvcomp", reason="nvCOMP's C library is not installed")
HOME = Path(libnvcomp.__path__[0])

STANDARD = [codec for codec in GENERAL_CODECS if codec.format.standard]
BYTE = dtype_of_name("uint8")
SIZES = [0, 1, 2, 5, 8, 64, 1000, 4095, 65535, 65536, 65537, 1 << 20, 12345678, 1 << 24]

every_format = pytest.mark.parametrize("kind", GENERAL_CODECS, ids=lambda kind: kind.name)


@pytest.fixture
def gpu() -> Stream:
    return get_device(GPU).stream()


@pytest.fixture
def host() -> Stream:
    return get_device("host").stream(inline=True)


def header(kind: type[GeneralCodec]) -> str:
    return (HOME / "include" / "nvcomp" / f"{kind.format.algorithm.lower()}.h").read_text()


def constant(kind: type[GeneralCodec], name: str) -> int:
    """Read a constant from nvCOMP's C header: shifts and sums of numbers."""
    found = re.search(rf"nvcomp\w+?{name} = ([^;]+);", header(kind))
    assert found is not None
    text = re.sub(r"(?<=\d)[uUlL]+", "", found[1])
    allowed = (ast.Expression, ast.BinOp, ast.LShift, ast.Add, ast.Sub, ast.Constant)
    assert all(isinstance(node, allowed) for node in ast.walk(ast.parse(text, mode="eval")))
    return int(eval(text))


@pytest.mark.parametrize("kind", STANDARD, ids=lambda kind: kind.name)
def test_limits_of_standard_bitstreams_match_nvcomp(kind: type[GeneralCodec]) -> None:
    assert kind.format.max_bytes == constant(kind, "CompressionMaxAllowedChunkSize")
    assert general.HOST_LIMITS[kind.name] <= constant(kind, "DecompressionMaxAllowedChunkSize")


@every_format
def test_alignments_match_nvcomp(kind: type[GeneralCodec]) -> None:
    sides = constant(kind, "RequiredCompressionAlignment"), constant(kind, "RequiredDecompressionAlignment")
    assert kind.format.alignment == max(sides)


class Options(ctypes.Structure):
    """The options of every compressor in nvCOMP's C interface: 64 bytes by value."""

    _fields_ = (("data", ctypes.c_char * 64),)


TYPES = {"|i1": 0, "|u1": 1, "<i2": 2, "<u2": 3, "<i4": 4, "<u4": 5, "<i8": 6, "<u8": 7}
TYPES |= {"<f2": 10, "<f4": 11, "<f8": 12}


def c_options(codec: GeneralCodec, options: dict[str, Any]) -> bytes:
    """Lay out our options for nvCOMP's C interface."""
    data_type = TYPES.get(options.get("data_type", "|i1"), 0)
    if isinstance(codec, Ans):
        return struct.pack("=ii", 0, data_type)
    if isinstance(codec, Bitcomp):
        return struct.pack("=iid", 0, data_type, 0.0)
    if isinstance(codec, Cascaded):
        asymmetric, bit_packing, all_encodings, level = 1, 1, 7, 3
        return struct.pack("=IIQQQB", data_type, asymmetric, bit_packing, 0, all_encodings, level)
    return struct.pack("=i", options.get("algorithm_type", 0))


def nvcomp_bound(codec: GeneralCodec, options: dict[str, Any], nbytes: int) -> int:
    """Return the bound of nvCOMP's C library for one encoded chunk, which needs no GPU."""
    name = {"GDeflate": "Gdeflate"}.get(codec.format.algorithm, codec.format.algorithm)
    shared = ctypes.CDLL(str(next(HOME.glob("lib64/libnvcomp.so*"))))
    function = shared[f"nvcompBatched{name}CompressGetMaxOutputChunkSize"]
    function.argtypes = ctypes.c_size_t, Options, ctypes.POINTER(ctypes.c_size_t)
    given, size = Options(), ctypes.c_size_t()
    layout = c_options(codec, options)
    ctypes.memmove(ctypes.byref(given), layout, len(layout))
    assert function(nbytes, given, ctypes.byref(size)) == 0
    return size.value


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("kind", [Lz4, Snappy, Zstd, Deflate], ids=lambda kind: kind.name)
def test_bounds_of_standard_bitstreams_cover_nvcomp(kind: type[GeneralCodec], nbytes: int) -> None:
    for level in kind.levels or [1]:
        codec = kind(level)
        assert codec.max_encoded(nbytes, BYTE) >= nvcomp_bound(codec, codec.options(BYTE), nbytes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [Gdeflate, Ans, Bitcomp, Cascaded], ids=lambda kind: kind.name)
def test_bounds_of_native_bitstreams_cover_nvcomp(kind: type[GeneralCodec], dtype: Any) -> None:
    codec = kind()
    chunk = nvcomp_bound(codec, codec.options(dtype), nvcomp.NVCOMP_CHUNK)
    for chunks in (1, 2, 100):
        bound = codec.max_encoded(chunks * nvcomp.NVCOMP_CHUNK // dtype.itemsize, dtype)
        assert bound >= nvcomp.NATIVE_HEADER + chunks * (chunk + nvcomp.NATIVE_FIELDS)
    assert codec.max_encoded(1, dtype) >= nvcomp.NATIVE_HEADER + chunk + nvcomp.NATIVE_FIELDS


def documented(function: Any, *words: str) -> bool:
    """Return True if one documented signature has all these arguments."""
    return any(all(word in line for word in words) for line in function.__doc__.splitlines() if "self:" in line)


def test_our_calls_are_documented() -> None:
    codec = library.Codec
    assert documented(codec.encode, "BatchArray", "out: object", "compression_config:")
    assert documented(codec.decode, "BatchArray", "out: object", "decompression_config:")
    assert documented(codec.compression_config, "uncompressed_sizes: list[int]")
    assert documented(codec.decompression_config, "compression_config:")
    assert "as_arrays(sources: list[object]" in library.as_arrays.__doc__
    assert "Sizes in bytes of every entry" in library.BatchArray.buffer_sizes.__doc__
    assert {"RAW", "NVCOMP_NATIVE"} <= set(library.BitstreamKind.__members__)


@every_format
def test_our_options_are_documented(kind: type[GeneralCodec]) -> None:
    text = library.Codec.__init__.__doc__
    common, _, special = text.partition("LZ4 algorithm specific options:")
    ours = special.partition(f"{kind.format.algorithm} algorithm specific options:")[2].partition("specific options:")[
        0
    ]
    for word in ("algorithm", "device_id", "cuda_stream", "uncomp_chunk_size", "bitstream_kind"):
        assert re.search(rf"^\s*{word}:", common, re.MULTILINE)
    for dtype in DTYPES:
        assert all(re.search(rf"^\s*{word}:", ours, re.MULTILINE) for word in kind().options(dtype))


def test_types_are_supported_by_nvcomp() -> None:
    assert {Ans().options(dtype)["data_type"] for dtype in DTYPES} == {"|u1", "<f2", "<f4"}
    bitcomp = {dtype.name: Bitcomp().options(dtype)["data_type"] for dtype in DTYPES}
    assert bitcomp["bfloat16"] == "<u2" and bitcomp["float16"] == "<f2" and bitcomp["complex128"] == "<f8"
    cascaded = {dtype.name: Cascaded().options(dtype)["data_type"] for dtype in DTYPES}
    assert cascaded["float32"] == "<u4" and cascaded["int16"] == "<i2" and cascaded["bool"] == "|u1"
    assert {kind[1] for kind in cascaded.values()} == {"i", "u"}


@every_format
@pytest.mark.skipif(not missing(GPU), reason="there is a GPU")
def test_nvcomp_accepts_the_options_and_lacks_only_the_gpu(kind: type[GeneralCodec]) -> None:
    for dtype in DTYPES:
        with pytest.raises(DeviceError) as caught:
            nvcomp.Session(kind.format, kind().options(dtype), "cuda:0", 1)
        message = str(caught.value)
        assert message.startswith(f"nvCOMP's {kind.format.algorithm} on cuda:0: expected a working GPU, got CUDA ")
        assert message.endswith(
            ". Check the driver with nvidia-smi, or choose a codec of this package's kernels, such as split."
        )
    with pytest.raises(DeviceError, match='got Unsupported argument: "wrong"'):
        nvcomp.Session(kind.format, {"wrong": 1}, "cuda:0", 1)


def test_without_nvcomp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", None)
    with pytest.raises(DeviceError) as caught:
        nvcomp.Session(Lz4.format, {}, "cuda:0", 1)
    assert str(caught.value) == (
        "nvCOMP on cuda:0: expected the package nvidia.nvcomp, "
        "got import of nvidia.nvcomp halted; None in sys.modules. "
        "Install it with 'pip install mpi_gpucomp[cuda13]', or [cuda12] for an older driver."
    )


@every_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 100_001])
def test_round_trip_on_a_gpu(kind: type[GeneralCodec], dtype: Any, count: int, gpu: Stream) -> None:
    array = values(dtype.name, count)
    back = np.zeros_like(array)
    decode(kind(), encode(kind(), array, gpu), back, gpu)
    assert back.tobytes() == array.tobytes()


@every_format
def test_unaligned_buffers_on_a_gpu(kind: type[GeneralCodec], gpu: Stream) -> None:
    array = values("uint8", 10_007)
    back = np.zeros_like(array)
    decode(kind(), encode(kind(), array, gpu, shift=3), back, gpu, shift=5)
    assert back.tobytes() == array.tobytes()


@every_format
def test_reduction_on_a_gpu(kind: type[GeneralCodec], gpu: Stream) -> None:
    target, arriving = values("float32", 50_001, 1), values("float32", 50_001, 2)
    expected = target + arriving
    decode(kind(), encode(kind(), arriving, gpu), target, gpu, "sum")
    assert (target == expected).all()


@pytest.mark.parametrize("kind", STANDARD, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_and_host_decode_each_other(kind: type[GeneralCodec], dtype: Any, gpu: Stream, host: Stream) -> None:
    for count in (1, 1000, 300_000):
        array = values(dtype.name, count)
        for writer, reader in ((gpu, host), (host, gpu)):
            back = np.zeros_like(array)
            decode(kind(), encode(kind(), array, writer), back, reader)
            assert back.tobytes() == array.tobytes()


@every_format
@pytest.mark.parametrize("nbytes", [1, 1000, 65536, 65537, 1 << 20])
def test_bounds_cover_nvcomps_codec_object(kind: type[GeneralCodec], nbytes: int, gpu: Stream) -> None:
    codec, array = kind(), np.zeros(nbytes, np.uint8)
    source = buffer_in(upload(array, gpu), array)
    session = nvcomp.session(codec.format, codec.options(source.dtype), gpu)
    wrapped = library.as_array(nvcomp._Span(source.address, nbytes, "|u1"))
    assert codec.max_encoded(nbytes, source.dtype) >= session._codec.get_max_comp_buffer_size(wrapped)
