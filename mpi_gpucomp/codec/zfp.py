"""ZFP at a fixed rate, in one dimension: byte for byte libzfp's stream without a header."""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING, ClassVar

from mpi_gpucomp.codec.kernel_codec import FixedCodec, Parameters, number

if TYPE_CHECKING:
    from mpi_gpucomp.device.base import DType

__all__ = ["Zfp"]

BLOCK, WORD_BITS = 4, 64
SHORTEST_BLOCK = {"float64": 12}
"""Bits of a block's exponent and the bit before it, below which libzfp does not go; 9 for the others."""


class Zfp(FixedCodec):
    """ZFP with `rate` bits for each value; 16-bit floats go through float32.

    A chunk with NaN or infinity travels raw. A block of 4 values all below about 1e-29 (float32) becomes zeros.
    """

    name: ClassVar[str] = "zfp"
    lossless: ClassVar[bool] = False
    tile: ClassVar[int] = 128
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16", "float32", "float64")
    parameters: ClassVar[Parameters] = Parameters(rate=number(0, 64, "bits per value, up to 64", above=True))

    def __init__(self, rate: float = 16) -> None:
        """Fix the rate in bits per value."""
        self.rate = rate

    @property
    def spec(self) -> str:
        """The name and the rate."""
        return f"zfp:rate={float(self.rate)!r}".removesuffix(".0")

    @property
    def wire_id(self) -> int:
        """Family, version, and the bits of a block: the only number that the decoder needs besides the type."""
        return 0x01 << 24 | 1 << 16 | floor(BLOCK * self.rate + 0.5)

    def block_bits(self, dtype: DType) -> int:
        """Bits of a block of 4 values, within what the type can use."""
        longest = BLOCK * max(32, 8 * dtype.itemsize)
        return min(longest, max(SHORTEST_BLOCK.get(dtype.name, 9), floor(BLOCK * self.rate + 0.5)))

    def encoded_size(self, count: int, dtype: DType) -> int:
        """Bytes of an encoding, which do not depend on the values."""
        return -(-(-(-count // BLOCK) * self.block_bits(dtype)) // WORD_BITS) * (WORD_BITS // 8)

    def kernel(self, way: str, dtype: DType) -> str:
        """Name the kernel for a type."""
        return f"zfp_{way}_{dtype.suffix}"

    def settings(self, dtype: DType) -> tuple[int, ...]:
        """Tell the kernels the length of a block."""
        return (self.block_bits(dtype),)
