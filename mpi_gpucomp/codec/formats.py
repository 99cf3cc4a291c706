"""The formats of the general codecs, with nvCOMP's limits and the bound of each.

lz4, snappy, zstd and deflate run on both machines, and their bounds hold for both encoders. gdeflate, ans, bitcomp and
cascaded need a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi_gpucomp.codec.general import GeneralCodec
from mpi_gpucomp.codec.nvcomp import PIECE, Format, native_bound

if TYPE_CHECKING:
    from mpi_gpucomp.device.dtype import DType

__all__ = ["FORMATS", "Ans", "Bitcomp", "Cascaded", "Deflate", "Gdeflate", "Lz4", "Snappy", "Zstd"]

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
