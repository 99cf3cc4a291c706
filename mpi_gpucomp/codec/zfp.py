"""The codec `zfp`: one-dimensional fixed-rate ZFP, byte for byte libzfp's stream without a header."""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING, ClassVar

from mpi_gpucomp.codec.kernel_codec import FixedCodec, Parameters, float_parameter

if TYPE_CHECKING:
    from mpi_gpucomp.device.base import DType

__all__ = ["Zfp"]

BLOCK, WORD_BITS = 4, 64
MIN_BLOCK_BITS = {"float64": 12}
"""libzfp's minimum: the exponent of a block and the bit before it; 9 for other types."""


class Zfp(FixedCodec):
    """ZFP with `rate` bits per value; 16-bit floats are converted to float32.

    A chunk with NaN or infinity is sent raw. A block of 4 values all below about 1e-29 (float32) becomes zeros.
    """

    name: ClassVar[str] = "zfp"
    lossless: ClassVar[bool] = False
    tile: ClassVar[int] = 128
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16", "float32", "float64")
    parameters: ClassVar[Parameters] = Parameters(
        rate=float_parameter(0, 64, "bits per value, up to 64", exclude_low=True)
    )

    def __init__(self, rate: float = 16) -> None:
        """Set the rate in bits per value."""
        self.rate = rate

    @property
    def spec(self) -> str:
        """The name and the rate."""
        return f"zfp:rate={float(self.rate)!r}".removesuffix(".0")

    @property
    def wire_id(self) -> int:
        """Family, version and the bits of a block, all that the decoder needs besides the type."""
        return 0x01 << 24 | 1 << 16 | floor(BLOCK * self.rate + 0.5)

    def block_bits(self, dtype: DType) -> int:
        """Return the bits of a block of 4 values, clamped to what the type can use."""
        most = BLOCK * max(32, 8 * dtype.itemsize)
        return min(most, max(MIN_BLOCK_BITS.get(dtype.name, 9), floor(BLOCK * self.rate + 0.5)))

    def encoded_size(self, count: int, dtype: DType) -> int:
        """Return the size of an encoding in bytes."""
        return -(-(-(-count // BLOCK) * self.block_bits(dtype)) // WORD_BITS) * (WORD_BITS // 8)

    def kernel(self, direction: str, dtype: DType) -> str:
        """Return the name of the kernel for a type."""
        return f"zfp_{direction}_{dtype.suffix}"

    def kernel_settings(self, dtype: DType) -> tuple[int, ...]:
        """Return the bits of a block."""
        return (self.block_bits(dtype),)
