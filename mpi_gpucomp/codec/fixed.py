"""Codecs whose encodings have a size that is known in advance, and that one kernel makes."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from mpi_gpucomp.codec.base import OPS
from mpi_gpucomp.codec.kernel import NOT_FINITE, KernelCodec, Mailbox

if TYPE_CHECKING:
    from mpi_gpucomp.codec.base import Pending
    from mpi_gpucomp.device.base import Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer
    from mpi_gpucomp.device.dtype import DType

__all__ = ["FixedCodec"]


class FixedCodec(KernelCodec):
    """A codec of fixed size; a chunk with values that the format has no room for travels raw."""

    tile: ClassVar[int]
    """Elements in a tile of its kernels."""

    @abstractmethod
    def encoded_size(self, count: int, dtype: DType) -> int:
        """Bytes of an encoding, which do not depend on the values."""

    @abstractmethod
    def kernel(self, way: str, dtype: DType) -> str:
        """Name the kernel that does `encode` or `decode`."""

    def settings(self, dtype: DType) -> tuple[int, ...]:
        """Return what the kernels want to know besides."""
        return ()

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Bytes of an encoding."""
        return self.encoded_size(count, dtype)

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the encoding."""
        self.check_encode(source, to, stream)
        if not source.count:
            return self.empty()
        mailbox, nbytes = Mailbox(stream), self.encoded_size(source.count, source.dtype)
        args = (source.address, source.count, to.address, *self.settings(source.dtype), mailbox.status)
        stream.launch(self.kernel("encode", source.dtype), -(-source.count // self.tile), *args)
        return mailbox.send(stream, lambda size, status: None if status & NOT_FINITE else nbytes)

    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        """Queue the decoding; every stream of the right length is one."""
        self.check_decode(source, nbytes, to, op, stream)
        if nbytes != self.encoded_size(to.count, to.dtype):
            return self.refuse(to.count, f"{nbytes} bytes instead of {self.encoded_size(to.count, to.dtype)}")
        if not to.count:
            return self.empty()
        args = (source.address, to.count, to.address, *self.settings(to.dtype), OPS[op])
        stream.launch(self.kernel("decode", to.dtype), -(-to.count // self.tile), *args)
        return self.after(stream, nbytes)
