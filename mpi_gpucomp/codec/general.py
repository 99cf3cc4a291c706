"""A general lossless codec: one that sees bytes, or numbers of a width, and knows nothing of the values.

Each call goes to the side that its stream is on: nvCOMP on a GPU, cramjam on the host. A format that has both sides
travels in its plain form, so that each machine, and any other program that knows the format, decodes what the other
wrote. No elements are no bytes. The formats themselves are in `formats`.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

from mpi_gpucomp.codec import nvcomp
from mpi_gpucomp.codec.base import OPS, Codec, Pending
from mpi_gpucomp.codec.kernel_codec import needed
from mpi_gpucomp.codec.nvcomp import PIECE, Format, native_bound
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
    "FORMATS",
    "LARGEST",
    "Ans",
    "Bitcomp",
    "Cascaded",
    "Deflate",
    "Gdeflate",
    "GeneralCodec",
    "Lz4",
    "Snappy",
    "Zstd",
    "package",
]


# The host side of the general codecs: the package cramjam, which releases the GIL and writes into the caller's memory.
#
# Every decoder bounds what it writes by the buffer, so that no bytes, however made, reach beyond it. Broken bytes
# are the
# error of their own `Pending` alone: the stream goes on with what is queued behind them.

LARGEST = {"lz4": 0x7E000000, "snappy": (1 << 31) - 1, "zstd": (1 << 31) - 1, "deflate": 1 << 31}
"""The longest plain buffer of each format: what the host's encoder takes and nvCOMP's decoder gives back."""

_READ, _WRITE = 0x100, 0x200
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes, _view.restype = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int), ctypes.py_object


def package(name: str) -> Any:
    """Return cramjam, or say that the codec `name` needs it."""
    return needed("cramjam", f"codec {name} on the host", "Install it with 'pip install mpi_gpucomp[codecs]'.")


def _cramjam_encode(name: str, level: int, source: Buffer, to: Memory, stream: Stream) -> Pending:
    """Queue the encoding; a buffer too long for the format travels raw."""
    library = package(name)
    if source.nbytes > LARGEST[name]:
        return Pending(lambda: True, lambda: None)

    def work() -> int:
        plain, encoded = _view(source.address, source.nbytes, _READ), _view(to.address, to.nbytes, _WRITE)
        return _compress(library, name, level, plain, encoded)

    return _queue(work, stream)


def _cramjam_decode(
    name: str,
    source: Memory,
    nbytes: int,
    to: Buffer,
    stream: Stream,
    broken: Callable[[str], DecodeError],
    finish: Callable[[int, Stream], None] | None,
) -> Pending:
    """Queue the decoding into `to`, or into temporary memory from whose address `finish` goes on if all went well."""
    library = package(name)

    def decode_to(address: int) -> int:
        if to.nbytes > LARGEST[name]:
            raise broken("a length that the format does not have")
        encoded, plain = _view(source.address, nbytes, _READ), _view(address, to.nbytes, _WRITE)
        try:
            size = _decompress(library, name, encoded, plain)
        except library.DecompressionError as error:
            raise broken(str(error)) from None
        if size != to.nbytes:
            raise broken(f"one of {size}")
        return size

    def decode_and(go_on: Callable[[int, Stream], None]) -> int:
        inline = InlineStream(cast("HostDevice", stream.device))
        with stream.device.alloc(to.nbytes) as temporary:
            size = decode_to(temporary.address)
            go_on(temporary.address, inline)
            inline.synchronize()
        return size

    return _queue(partial(decode_and, finish) if finish else partial(decode_to, to.address), stream)


def _compress(library: Any, name: str, level: int, plain: memoryview, encoded: memoryview) -> int:
    if name == "lz4":
        return int(library.lz4.compress_block_into(plain, encoded, store_size=False))
    if name == "snappy":
        return int(library.snappy.compress_raw_into(plain, encoded))
    return int(getattr(library, name).compress_into(plain, encoded, level=level))


def _decompress(library: Any, name: str, encoded: memoryview, plain: memoryview) -> int:
    if name == "lz4":
        return int(library.lz4.decompress_block_into(encoded, plain, output_len=len(plain)))
    if name == "snappy":
        return int(library.snappy.decompress_raw_into(encoded, plain))
    return int(getattr(library, name).decompress_into(encoded, plain))


def _queue(work: Callable[[], int], stream: Stream) -> Pending:
    """Queue work whose error is its own answer, not the stream's."""
    outcome: list[int | Exception] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    stream.run(run)
    event = stream.record()

    def answer() -> int:
        event.wait()
        (found,) = outcome
        if isinstance(found, Exception):
            raise found
        return found

    return Pending(event.done, answer)


VERSION = 1
DEFAULT_LEVEL = 1


class GeneralCodec(Codec):
    """A format that nvCOMP knows, and the host as well where it is plain."""

    lossless: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = tuple(dtype.name for dtype in DTYPES)

    family: ClassVar[int]
    """The first byte of the wire id."""

    form: ClassVar[Format]
    levels: ClassVar[range] = range(0)
    """What the parameter `level` may be: the encoder's effort, which the decoder never sees."""

    def __init__(self, level: int = DEFAULT_LEVEL) -> None:
        """Fix the level, for those that have one."""
        self.level = level

    @classmethod
    def from_parameters(cls, parameters: dict[str, str]) -> GeneralCodec:
        """Make the codec from the parameters of its spec string."""
        for key, value in parameters.items():
            if key != "level" or not _is_among(value, cls.levels):
                raise _wrong_parameter(cls.name, cls.levels, f"{key}={value}")
        return cls(int(parameters.get("level", DEFAULT_LEVEL)))

    @property
    def spec(self) -> str:
        """The name, with the level where it is not the default."""
        return self.name if self.level == DEFAULT_LEVEL else f"{self.name}:level={self.level}"

    @property
    def wire_id(self) -> int:
        """Family and version; the level changes no decoder."""
        return self.family << 24 | VERSION << 16

    def options(self, dtype: DType) -> dict[str, Any]:
        """Return nvCOMP's options for elements of this type."""
        return {}

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the encoding; a buffer too long for the format travels raw."""
        self.check_dtype(source.dtype)
        self.check_capacity(source, to)
        on_host = self._check_side(stream)
        if source.count == 0:
            return Pending(lambda: True, lambda: 0)
        if on_host:
            return _cramjam_encode(self.name, self.level, source, to, stream)
        return nvcomp.session(self.form, self.options(source.dtype), stream).encode(source, to, stream)

    def decode(self, source: Memory, nbytes: int, to: Buffer, stream: Stream) -> Pending:
        """Queue the decoding, which must fill `to` exactly."""
        return self.decode_reduce(source, nbytes, to, "replace", stream)

    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        """Queue the decoding into temporary memory and the reduction from there."""
        self.check_dtype(to.dtype)
        self.check_operation(op, to.dtype)
        on_host = self._check_side(stream)
        broken = partial(self._broken, to.nbytes)
        if nbytes == to.count == 0:
            return Pending(lambda: True, lambda: 0)
        if not (to.count and 0 < nbytes <= min(source.nbytes, self.max_encoded(to.count, to.dtype))):
            return Pending(lambda: True, partial(_raise, broken(f"{nbytes} bytes")))
        finish = None if op == "replace" else partial(_reduce, to, op)
        if on_host:
            return _cramjam_decode(self.name, source, nbytes, to, stream, broken, finish)
        session = nvcomp.session(self.form, self.options(to.dtype), stream)
        return session.decode(source, nbytes, to, stream, broken, finish)

    def tolerates_damage(self, stream: Stream) -> bool:
        """On the host; nvCOMP does not promise as much."""
        return stream.device.name == "host"

    def _broken(self, nbytes: int, got: str) -> DecodeError:
        return DecodeError(
            f"codec {self.spec}",
            expected=f"a {self.name} stream of {nbytes} plain bytes",
            got=got,
            remedy="The bytes were damaged or cut short on their way, or another codec wrote them.",
        )

    def _check_side(self, stream: Stream) -> bool:
        """Say whether the stream is the host's, and raise if the format is not for it."""
        on_host = stream.device.name == "host"
        if on_host and not self.form.plain:
            raise DeviceError(
                f"codec {self.spec}",
                expected="a stream of a GPU",
                got="one of the host",
                remedy=f"The codec {self.name} needs a GPU; lz4, snappy, zstd and deflate run on both machines.",
            )
        return on_host


def _reduce(to: Buffer, op: str, decoded: int, stream: Stream) -> None:
    """Queue to = to op decoded."""
    tiles = -(-to.count // REDUCE_TILE)
    stream.launch(f"reduce_{to.dtype.suffix}", tiles, to.address, decoded, to.count, OPS[op])


def _raise(error: DecodeError) -> NoReturn:
    raise error


def _is_among(value: str, levels: range) -> bool:
    return value.isascii() and value.isdecimal() and int(value) in levels


def _wrong_parameter(name: str, levels: range, got: str) -> SpecError:
    expected = f"level={levels[0]}..{levels[-1]}" if levels else "no parameters"
    example = f", or for example {name}:level={levels[2]}" if levels else ""
    return SpecError(f"codec {name}", expected=expected, got=got, remedy=f"Write {name}{example}.")


# The formats of the general codecs, with nvCOMP's limits and the bound of each.
#
# lz4, snappy, zstd and deflate run on both machines, and their bounds hold for both encoders. gdeflate, ans,
# bitcomp and
# cascaded need a GPU.

SLACK = 64
"""Added to the libraries' bounds of the plain form: what nvCOMP may round a length up by."""

ANY_LENGTH = 1 << 62
"""The native form has no longest buffer: it cuts."""


class Lz4(GeneralCodec):
    """LZ4, one block without a length before it."""

    name, family, form = "lz4", 0x10, Format("LZ4", plain=True, largest=1 << 24, alignment=4)

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return LZ4's bound, which is above nvCOMP's."""
        nbytes = count * dtype.itemsize
        return nbytes + nbytes // 255 + 16 + SLACK


class Snappy(GeneralCodec):
    """Snappy, raw: the length and the elements, no framing."""

    name, family, form = "snappy", 0x11, Format("Snappy", plain=True, largest=1 << 24, alignment=1)

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return Snappy's bound, which is nvCOMP's too."""
        nbytes = count * dtype.itemsize
        return 32 + nbytes + nbytes // 6 + SLACK


class Zstd(GeneralCodec):
    """Zstandard, one frame; the level is for the host's encoder, nvCOMP has one of its own."""

    name, family, form = "zstd", 0x12, Format("Zstd", plain=True, largest=(1 << 31) - 1, alignment=8)
    levels = range(1, 23)

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return Zstandard's bound, which is above nvCOMP's."""
        nbytes = count * dtype.itemsize
        return nbytes + (nbytes >> 8) + max(0, (1 << 17) - nbytes >> 11) + SLACK


class Deflate(GeneralCodec):
    """Deflate, raw: no header or checksum of zlib or gzip around it."""

    name, family, form = "deflate", 0x13, Format("Deflate", plain=True, largest=1 << 31, alignment=8)
    levels = range(1, 10)

    def options(self, dtype: DType) -> dict[str, Any]:
        """Return nvCOMP's algorithm that comes nearest to zlib's level."""
        return {"algorithm_type": 1 if self.level == 1 else 2 if self.level < 6 else 4 if self.level < 9 else 5}

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return the bound of nvCOMP, which is far above zlib's."""
        return count * dtype.itemsize * 579 // 256 + 264 + SLACK


class Gdeflate(GeneralCodec):
    """GDeflate: Deflate rearranged for 32 lanes; the level is nvCOMP's algorithm."""

    name, family, form = "gdeflate", 0x14, Format("GDeflate", plain=False, largest=ANY_LENGTH, alignment=8)
    levels = range(6)

    def options(self, dtype: DType) -> dict[str, Any]:
        """Return the algorithm."""
        return {"algorithm_type": self.level}

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return the bound of nvCOMP for each piece."""
        return native_bound(count * dtype.itemsize, 2 * PIECE + 288)


class Ans(GeneralCodec):
    """Asymmetric numeral systems, over half or single floats where the elements are such, else over bytes."""

    name, family, form = "ans", 0x15, Format("ANS", plain=False, largest=ANY_LENGTH, alignment=16)

    def options(self, dtype: DType) -> dict[str, Any]:
        """Return nvCOMP's type: its half float stands for every 16-bit float."""
        return {"data_type": {"float16": "<f2", "bfloat16": "<f2", "float32": "<f4"}.get(dtype.name, "|u1")}

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return the bound of nvCOMP for each piece, the one of bytes being the largest."""
        return native_bound(count * dtype.itemsize, PIECE + 27184)


class Bitcomp(GeneralCodec):
    """Bitcomp in its lossless mode, over the elements as numbers."""

    name, family, form = "bitcomp", 0x16, Format("Bitcomp", plain=False, largest=ANY_LENGTH, alignment=8)

    def options(self, dtype: DType) -> dict[str, Any]:
        """Return nvCOMP's type; what it has no name for goes as integers of the same width."""
        return {"data_type": _FLOATS.get(dtype.name) or _integers(dtype)}

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return the bound of nvCOMP for each piece."""
        return native_bound(count * dtype.itemsize, PIECE + 96)


class Cascaded(GeneralCodec):
    """Run lengths, differences and bit packing, over the elements' bits as integers."""

    name, family, form = "cascaded", 0x17, Format("Cascaded", plain=False, largest=ANY_LENGTH, alignment=8)

    def options(self, dtype: DType) -> dict[str, Any]:
        """Return the integer type of the elements' width."""
        return {"data_type": _integers(dtype)}

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return the bound of nvCOMP for each piece."""
        return native_bound(count * dtype.itemsize, PIECE + 8)


FORMATS: tuple[type[GeneralCodec], ...] = (Lz4, Snappy, Zstd, Deflate, Gdeflate, Ans, Bitcomp, Cascaded)
"""All of them."""

_FLOATS = {"float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<f4", "complex128": "<f8"}


def _integers(dtype: DType) -> str:
    width = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    return f"{'|' if width == 1 else '<'}{'i' if dtype.kind == 'i' else 'u'}{width}"
