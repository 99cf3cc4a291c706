"""The codec `none`: bytes are sent raw."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mpi_gpucomp.codec.base import OPS
from mpi_gpucomp.codec.kernel_codec import KernelCodec
from mpi_gpucomp.device.base import DTYPES

if TYPE_CHECKING:
    from mpi_gpucomp.codec.base import Pending
    from mpi_gpucomp.device.base import DType, Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer

__all__ = ["REDUCE_TILE", "Raw"]

REDUCE_TILE = 1024
"""Elements in a tile of the kernels reduce_*."""


class Raw(KernelCodec):
    """A copy without encoding."""

    name: ClassVar[str] = "none"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = tuple(dtype.name for dtype in DTYPES)

    @property
    def spec(self) -> str:
        """The name."""
        return "none"

    @property
    def wire_id(self) -> int:
        """Zero: there is no encoded format."""
        return 0

    def encoded_size(self, count: int, dtype: DType) -> int:
        """Return the bytes of the elements."""
        return count * dtype.itemsize

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return the bytes of the elements."""
        return count * dtype.itemsize

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue a copy."""
        self.check_encode(source, to, stream)
        stream.copy(to.address, source.address, source.nbytes)
        return self.recorded(stream, source.nbytes)

    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        """Queue a copy, or a reduction."""
        self.check_decode(source, nbytes, to, op, stream)
        if nbytes != to.nbytes:
            return self.failed(to.count, f"{nbytes} bytes instead of {to.nbytes}")
        if op == "replace":
            stream.copy(to.address, source.address, nbytes)
        else:
            tiles = -(-to.count // REDUCE_TILE)
            stream.launch(f"reduce_{to.dtype.suffix}", tiles, to.address, source.address, to.count, OPS[op])
        return self.recorded(stream, nbytes)
