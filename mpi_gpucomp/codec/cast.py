"""The codec `cast`: floats rounded to a type of half the size."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mpi_gpucomp.codec.kernel_codec import FixedCodec
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from mpi_gpucomp.device.base import DType

__all__ = ["Cast"]

TARGET_IDS = {"bf16": 1, "f16": 2, "f32": 3}


class Cast(FixedCodec):
    """float32 as bfloat16 or float16, float64 as float32; a chunk that would overflow is sent raw."""

    name: ClassVar[str] = "cast"
    lossless: ClassVar[bool] = False
    tile: ClassVar[int] = 1024

    def __init__(self, to: str = "bf16") -> None:
        """Set the smaller type by its kernel suffix."""
        self.to = to
        self.dtypes = ("float64",) if to == "f32" else ("float32",)  # type: ignore[misc]

    @classmethod
    def from_parameters(cls, parameters: dict[str, str]) -> Cast:
        """Create the codec from its spec string, whose only parameter is the smaller type."""
        if len(parameters) != 1 or not TARGET_IDS.keys() >= parameters.keys() or any(parameters.values()):
            given = ",".join(f"{key}={value}" if value else key for key, value in parameters.items())
            raise SpecError(
                "codec cast",
                expected=f"one of {', '.join(TARGET_IDS)}",
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
        return 0x05 << 24 | 1 << 16 | TARGET_IDS[self.to]

    def encoded_size(self, count: int, dtype: DType) -> int:
        """Return half the bytes of the elements."""
        return count * dtype.itemsize // 2

    def kernel(self, direction: str, dtype: DType) -> str:
        """Return the name of the kernel for both types."""
        return f"cast_{direction}_{dtype.suffix}_{self.to}"
