"""Floats in fewer bits: half the bytes, rounded to nearest."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mpi_gpucomp.codec.kernel_codec import FixedCodec
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from mpi_gpucomp.device.base import DType

__all__ = ["Cast"]

NUMBERS = {"bf16": 1, "f16": 2, "f32": 3}


class Cast(FixedCodec):
    """float32 as bfloat16 or float16, float64 as float32; a chunk with a number too large for it travels raw."""

    name: ClassVar[str] = "cast"
    lossless: ClassVar[bool] = False
    tile: ClassVar[int] = 1024

    def __init__(self, to: str = "bf16") -> None:
        """Fix the smaller type by its kernel name."""
        self.to = to
        self.dtypes = ("float64",) if to == "f32" else ("float32",)  # type: ignore[misc]

    @classmethod
    def from_parameters(cls, parameters: dict[str, str]) -> Cast:
        """Make the codec from the one word of its spec string."""
        if len(parameters) != 1 or not NUMBERS.keys() >= parameters.keys() or any(parameters.values()):
            given = ",".join(f"{key}={value}" if value else key for key, value in parameters.items())
            raise SpecError(
                "codec cast",
                expected=f"one of {', '.join(NUMBERS)}",
                got=f"'{given}'",
                remedy="Write for example cast:bf16.",
            )
        return cls(next(iter(parameters)))

    @property
    def spec(self) -> str:
        """The name and the smaller type."""
        return f"cast:{self.to}"

    @property
    def wire_id(self) -> int:
        """Family, version and the smaller type."""
        return 0x05 << 24 | 1 << 16 | NUMBERS[self.to]

    def encoded_size(self, count: int, dtype: DType) -> int:
        """Half of the bytes."""
        return count * dtype.itemsize // 2

    def kernel(self, way: str, dtype: DType) -> str:
        """Name the kernel for both types."""
        return f"cast_{way}_{dtype.suffix}_{self.to}"
