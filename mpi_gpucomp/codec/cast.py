"""Floats in fewer bits: half the bytes, rounded to nearest."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mpi_gpucomp.codec.base import OPS
from mpi_gpucomp.codec.kernel import NOT_FINITE, KernelCodec, Mailbox
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from mpi_gpucomp.codec.base import Pending
    from mpi_gpucomp.device.base import Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer
    from mpi_gpucomp.device.dtype import DType

__all__ = ["Cast"]

TILE = 1024
NUMBERS = {"bf16": 1, "f16": 2, "f32": 3}


class Cast(KernelCodec):
    """float32 as bfloat16 or float16, float64 as float32; a chunk with a number too large for it travels raw."""

    name: ClassVar[str] = "cast"
    lossless: ClassVar[bool] = False

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

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Half of the bytes."""
        return self.encoded_size(count, dtype)

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the rounding."""
        self.check_encode(source, to, stream)
        if not source.count:
            return self.empty()
        mailbox, nbytes = Mailbox(stream), self.encoded_size(source.count, source.dtype)
        kernel = f"cast_encode_{source.dtype.suffix}_{self.to}"
        stream.launch(kernel, -(-source.count // TILE), source.address, source.count, to.address, mailbox.status)
        return mailbox.send(stream, lambda size, status: None if status & NOT_FINITE else nbytes)

    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        """Queue the widening."""
        self.check_decode(source, nbytes, to, op, stream)
        if nbytes != self.encoded_size(to.count, to.dtype):
            return self.refuse(to.count, f"{nbytes} bytes instead of {self.encoded_size(to.count, to.dtype)}")
        kernel = f"cast_decode_{to.dtype.suffix}_{self.to}"
        stream.launch(kernel, -(-to.count // TILE), source.address, to.count, to.address, OPS[op])
        return self.after(stream, nbytes)
