"""General-purpose lossless codecs, which see bytes or integers and not the values.

On a GPU stream nvCOMP does the work, on a host stream the package cramjam. lz4, snappy, zstd and deflate run on both
and use the standard bitstream of their format, so that host, GPU and any other program decode each other's bytes; their
bounds hold for both encoders. gdeflate, ans, bitcomp and cascaded need a GPU. No elements encode to no bytes.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

from mpi_gpucomp.codec import nvcomp
from mpi_gpucomp.codec.base import OPS, Codec, Pending, require_package
from mpi_gpucomp.codec.nvcomp import NVCOMP_CHUNK, Format, native_bound
from mpi_gpucomp.codec.raw import REDUCE_TILE
from mpi_gpucomp.device.base import DTYPES
from mpi_gpucomp.device.host import InlineStream
from mpi_gpucomp.errors import DecodeError, DeviceError, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.device.base import DType, Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer
    from mpi_gpucomp.device.host import HostDevice

__all__ = [
    "GENERAL_CODECS",
    "HOST_LIMITS",
    "Ans",
    "Bitcomp",
    "Cascaded",
    "Deflate",
    "Gdeflate",
    "GeneralCodec",
    "Lz4",
    "Snappy",
    "Zstd",
    "require_cramjam",
]

VERSION = 1
DEFAULT_LEVEL = 1

HOST_LIMITS = {"lz4": 0x7E000000, "snappy": (1 << 31) - 1, "zstd": (1 << 31) - 1, "deflate": 1 << 31}
"""Maximum decoded bytes of each format: the host's encoder accepts them and nvCOMP's decoder can restore them."""

SLACK = 64
"""Added to the libraries' bounds of the standard bitstreams: nvCOMP may round a length up by as much."""

UNLIMITED = 1 << 62
"""The native bitstream has no maximum length: nvCOMP divides the buffer into chunks."""


class GeneralCodec(Codec):
    """A format of nvCOMP, which also runs on the host if its bitstream is the standard one."""

    lossless: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = tuple(dtype.name for dtype in DTYPES)

    family: ClassVar[int]
    """The first byte of the wire id."""

    format: ClassVar[Format]
    levels: ClassVar[range] = range(0)
    """Valid values of the parameter `level`, the encoder's effort; decoders do not depend on it."""

    def __init__(self, level: int = DEFAULT_LEVEL) -> None:
        """Set the level, for codecs that have one."""
        self.level = level

    @classmethod
    def from_parameters(cls, parameters: dict[str, str]) -> GeneralCodec:
        """Create the codec from the parameters of its spec string."""
        for key, value in parameters.items():
            if key != "level" or not (value.isascii() and value.isdecimal() and int(value) in cls.levels):
                raise _invalid_parameter(cls.name, cls.levels, f"{key}={value}")
        return cls(int(parameters.get("level", DEFAULT_LEVEL)))

    @property
    def spec(self) -> str:
        """The name, with the level if it is not the default."""
        return self.name if self.level == DEFAULT_LEVEL else f"{self.name}:level={self.level}"

    @property
    def wire_id(self) -> int:
        """Family and version; decoders do not depend on the level."""
        return self.family << 24 | VERSION << 16

    def options(self, dtype: DType) -> dict[str, Any]:
        """Return nvCOMP's options for elements of this type."""
        return {}

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the encoding; a buffer too long for the format is sent raw."""
        self.check_dtype(source.dtype)
        self.check_capacity(source, to)
        on_host = self._runs_on_host(stream)
        if source.count == 0:
            return Pending(lambda: True, lambda: 0)
        if on_host:
            return _cramjam_encode(self.name, self.level, source, to, stream)
        return nvcomp.session(self.format, self.options(source.dtype), stream).encode(source, to, stream)

    def decode(self, source: Memory, nbytes: int, to: Buffer, stream: Stream) -> Pending:
        """Queue the decoding, which must fill `to` exactly."""
        return self.decode_reduce(source, nbytes, to, "replace", stream)

    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        """Queue the decoding, for a reduction into temporary memory from which a kernel reduces."""
        self.check_dtype(to.dtype)
        self.check_operation(op, to.dtype)
        on_host = self._runs_on_host(stream)
        error = partial(self._decode_error, to.nbytes)
        if nbytes == to.count == 0:
            return Pending(lambda: True, lambda: 0)
        if not (to.count and 0 < nbytes <= min(source.nbytes, self.max_encoded(to.count, to.dtype))):
            return Pending(lambda: True, partial(_raise, error(f"{nbytes} bytes")))
        reduce = None if op == "replace" else partial(_reduce, to, op)
        if on_host:
            return _cramjam_decode(self.name, source, nbytes, to, stream, error, reduce)
        session = nvcomp.session(self.format, self.options(to.dtype), stream)
        return session.decode(source, nbytes, to, stream, error, reduce)

    def tolerates_damage(self, stream: Stream) -> bool:
        """Return True on the host; nvCOMP does not guarantee it."""
        return stream.device.name == "host"

    def _decode_error(self, nbytes: int, got: str) -> DecodeError:
        return DecodeError(
            f"codec {self.spec}",
            expected=f"a {self.name} stream of {nbytes} decoded bytes",
            got=got,
            remedy="The bytes were damaged or truncated in transit, or written by another codec.",
        )

    def _runs_on_host(self, stream: Stream) -> bool:
        """Return True for a stream of the host; raise if the format needs a GPU."""
        on_host = stream.device.name == "host"
        if on_host and not self.format.standard:
            raise DeviceError(
                f"codec {self.spec}",
                expected="a stream of a GPU",
                got="one of the host",
                remedy=f"The codec {self.name} needs a GPU; lz4, snappy, zstd and deflate run on both.",
            )
        return on_host


def _reduce(to: Buffer, op: str, decoded: int, stream: Stream) -> None:
    """Queue to = to op decoded."""
    tiles = -(-to.count // REDUCE_TILE)
    stream.launch(f"reduce_{to.dtype.suffix}", tiles, to.address, decoded, to.count, OPS[op])


def _raise(error: DecodeError) -> NoReturn:
    raise error


def _invalid_parameter(name: str, levels: range, got: str) -> SpecError:
    expected = f"level={levels[0]}..{levels[-1]}" if levels else "no parameters"
    example = f", or for example {name}:level={levels[2]}" if levels else ""
    return SpecError(f"codec {name}", expected=expected, got=got, remedy=f"Write {name}{example}.")


class Lz4(GeneralCodec):
    """LZ4: one block without a length prefix."""

    name, family, format = "lz4", 0x10, Format("LZ4", standard=True, max_bytes=1 << 24, alignment=4)

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return LZ4's bound, which is above nvCOMP's."""
        nbytes = count * dtype.itemsize
        return nbytes + nbytes // 255 + 16 + SLACK


class Snappy(GeneralCodec):
    """Snappy: a length and the elements, no framing."""

    name, family, format = "snappy", 0x11, Format("Snappy", standard=True, max_bytes=1 << 24, alignment=1)

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return Snappy's bound, which is also nvCOMP's."""
        nbytes = count * dtype.itemsize
        return 32 + nbytes + nbytes // 6 + SLACK


class Zstd(GeneralCodec):
    """Zstandard: one frame; the level is for the host's encoder, nvCOMP has only one."""

    name, family, format = "zstd", 0x12, Format("Zstd", standard=True, max_bytes=(1 << 31) - 1, alignment=8)
    levels = range(1, 23)

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return Zstandard's bound, which is above nvCOMP's."""
        nbytes = count * dtype.itemsize
        return nbytes + (nbytes >> 8) + max(0, (1 << 17) - nbytes >> 11) + SLACK


class Deflate(GeneralCodec):
    """Deflate without a zlib or gzip header and checksum."""

    name, family, format = "deflate", 0x13, Format("Deflate", standard=True, max_bytes=1 << 31, alignment=8)
    levels = range(1, 10)

    def options(self, dtype: DType) -> dict[str, Any]:
        """Return the algorithm of nvCOMP that is closest to zlib's level."""
        return {"algorithm_type": 1 if self.level == 1 else 2 if self.level < 6 else 4 if self.level < 9 else 5}

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return nvCOMP's bound, which is far above zlib's."""
        return count * dtype.itemsize * 579 // 256 + 264 + SLACK


class Gdeflate(GeneralCodec):
    """GDeflate: Deflate rearranged for 32 lanes; the level is nvCOMP's algorithm."""

    name, family, format = "gdeflate", 0x14, Format("GDeflate", standard=False, max_bytes=UNLIMITED, alignment=8)
    levels = range(6)

    def options(self, dtype: DType) -> dict[str, Any]:
        """Return the algorithm."""
        return {"algorithm_type": self.level}

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return nvCOMP's bound."""
        return native_bound(count * dtype.itemsize, 2 * NVCOMP_CHUNK + 288)


class Ans(GeneralCodec):
    """Asymmetric numeral systems, over 16-bit and 32-bit floats as such and over the bytes of other types."""

    name, family, format = "ans", 0x15, Format("ANS", standard=False, max_bytes=UNLIMITED, alignment=16)

    def options(self, dtype: DType) -> dict[str, Any]:
        """Return nvCOMP's type, float16 for both 16-bit floats."""
        return {"data_type": {"float16": "<f2", "bfloat16": "<f2", "float32": "<f4"}.get(dtype.name, "|u1")}

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return nvCOMP's bound for bytes, the largest of the types."""
        return native_bound(count * dtype.itemsize, NVCOMP_CHUNK + 27184)


class Bitcomp(GeneralCodec):
    """Bitcomp in its lossless mode, over the elements as numbers."""

    name, family, format = "bitcomp", 0x16, Format("Bitcomp", standard=False, max_bytes=UNLIMITED, alignment=8)

    def options(self, dtype: DType) -> dict[str, Any]:
        """Return nvCOMP's type, or an integer of the same width if it has none."""
        return {"data_type": _NVCOMP_FLOATS.get(dtype.name) or _nvcomp_integer(dtype)}

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return nvCOMP's bound."""
        return native_bound(count * dtype.itemsize, NVCOMP_CHUNK + 96)


class Cascaded(GeneralCodec):
    """Run lengths, differences and bit packing, over the elements' bits as integers."""

    name, family, format = "cascaded", 0x17, Format("Cascaded", standard=False, max_bytes=UNLIMITED, alignment=8)

    def options(self, dtype: DType) -> dict[str, Any]:
        """Return the integer type of the elements' width."""
        return {"data_type": _nvcomp_integer(dtype)}

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return nvCOMP's bound."""
        return native_bound(count * dtype.itemsize, NVCOMP_CHUNK + 8)


GENERAL_CODECS: tuple[type[GeneralCodec], ...] = (Lz4, Snappy, Zstd, Deflate, Gdeflate, Ans, Bitcomp, Cascaded)

_NVCOMP_FLOATS = {"float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<f4", "complex128": "<f8"}


def _nvcomp_integer(dtype: DType) -> str:
    width = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    return f"{'|' if width == 1 else '<'}{'i' if dtype.kind == 'i' else 'u'}{width}"


def require_cramjam(codec: str) -> Any:
    """Import cramjam, which releases the GIL and writes into the caller's memory; raise if it is missing."""
    remedy = "Install it with 'pip install mpi_gpucomp[codecs]'."
    return require_package("cramjam", f"codec {codec} on the host", remedy)


def _cramjam_encode(name: str, level: int, source: Buffer, to: Memory, stream: Stream) -> Pending:
    """Queue the encoding; a buffer too long for the format is sent raw."""
    library = require_cramjam(name)
    if source.nbytes > HOST_LIMITS[name]:
        return Pending(lambda: True, lambda: None)

    def work() -> int:
        decoded, encoded = _view(source.address, source.nbytes, _READ), _view(to.address, to.nbytes, _WRITE)
        return _compress(library, name, level, decoded, encoded)

    return _queue(work, stream)


def _cramjam_decode(
    name: str,
    source: Memory,
    nbytes: int,
    to: Buffer,
    stream: Stream,
    error: Callable[[str], DecodeError],
    reduce: Callable[[int, Stream], None] | None,
) -> Pending:
    """Queue the decoding into `to`, or into temporary memory that `reduce` then reads.

    Every decoder bounds its output by the buffer, so that no input can write beyond it.
    """
    library = require_cramjam(name)

    def decode_to(address: int) -> int:
        if to.nbytes > HOST_LIMITS[name]:
            raise error("a length that the format does not support")
        encoded, decoded = _view(source.address, nbytes, _READ), _view(address, to.nbytes, _WRITE)
        try:
            size = _decompress(library, name, encoded, decoded)
        except library.DecompressionError as failure:
            raise error(str(failure)) from None
        if size != to.nbytes:
            raise error(f"one of {size}")
        return size

    def decode_and_reduce(queue_reduction: Callable[[int, Stream], None]) -> int:
        inline = InlineStream(cast("HostDevice", stream.device))
        with stream.device.alloc(to.nbytes) as temporary:
            size = decode_to(temporary.address)
            queue_reduction(temporary.address, inline)
            inline.synchronize()
        return size

    return _queue(partial(decode_and_reduce, reduce) if reduce else partial(decode_to, to.address), stream)


def _compress(library: Any, name: str, level: int, decoded: memoryview, encoded: memoryview) -> int:
    if name == "lz4":
        return int(library.lz4.compress_block_into(decoded, encoded, store_size=False))
    if name == "snappy":
        return int(library.snappy.compress_raw_into(decoded, encoded))
    return int(getattr(library, name).compress_into(decoded, encoded, level=level))


def _decompress(library: Any, name: str, encoded: memoryview, decoded: memoryview) -> int:
    if name == "lz4":
        return int(library.lz4.decompress_block_into(encoded, decoded, output_len=len(decoded)))
    if name == "snappy":
        return int(library.snappy.decompress_raw_into(encoded, decoded))
    return int(getattr(library, name).decompress_into(encoded, decoded))


_READ, _WRITE = 0x100, 0x200
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes, _view.restype = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int), ctypes.py_object


def _queue(work: Callable[[], int], stream: Stream) -> Pending:
    """Queue work whose error belongs to its own Pending: the stream continues with the work queued behind it."""
    outcome: list[int | Exception] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    stream.run(run)
    event = stream.record()

    def result() -> int:
        event.wait()
        (found,) = outcome
        if isinstance(found, Exception):
            raise found
        return found

    return Pending(event.done, result)
