"""What codecs made of kernels share: checks before the work is queued, and the answer that kernels leave behind."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from mpi_gpucomp.codec.base import Codec, Pending
from mpi_gpucomp.codec.parameters import Parameters
from mpi_gpucomp.errors import BufferError, StreamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from mpi_gpucomp.device.base import Device, Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer

__all__ = ["BAD_STREAM", "NOT_FINITE", "KernelCodec", "Mailbox"]

BAD_STREAM, NOT_FINITE = 1, 2
"""What a kernel can say went wrong, as in kernels/status.h."""


class Mailbox:
    """Two numbers that kernels leave for the processor: a size and what went wrong."""

    NBYTES = 16

    def __init__(self, stream: Stream) -> None:
        """Take empty room near the kernels: the processor's own where they run on it."""
        device: Device = stream.device
        self._here = device.pinned(self.NBYTES)
        ctypes.memset(self._here.address, 0, self.NBYTES)
        self._there = self._here if device.name == "host" else device.alloc(self.NBYTES)
        self.size, self.status = self._there.address, self._there.address + 8
        if self._there is not self._here:
            stream.copy(self._there.address, self._here.address, self.NBYTES)

    def send(self, stream: Stream, read: Callable[[int, int], int | None]) -> Pending:
        """Queue the way back; the answer is what `read` makes of size and status."""
        here = self._here
        if self._there is not here:
            stream.copy(here.address, self._there.address, self.NBYTES)
            stream.release(self._there)
        stream.run(partial(_outlast, here))  # also if nobody keeps the answer
        event = stream.record()

        def answer() -> int | None:
            event.wait()
            size, status = (ctypes.c_uint64 * 2).from_address(here.address)
            here.release()
            return read(size, status)

        return Pending(event.done, answer)


class KernelCodec(Codec):
    """A codec whose work is done by kernels of this project, on any device."""

    parameters: ClassVar[Parameters] = Parameters()
    """What its spec string can say; each is an argument of the class."""

    @classmethod
    def from_parameters(cls, parameters: dict[str, str]) -> Self:
        """Make the codec from the parameters of its spec string."""
        return cls(**cls.parameters.read(cls.name, parameters))

    def check_encode(self, source: Buffer, to: Memory, stream: Stream) -> None:
        """Raise unless `source` can be encoded into `to` on this stream."""
        self.check_dtype(source.dtype)
        self._check_place(source, stream)
        self.check_capacity(source, to)

    def check_decode(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> None:
        """Raise unless `nbytes` of `source` can be decoded onto `to` on this stream."""
        self.check_dtype(to.dtype)
        self._check_place(to, stream)
        self.check_operation(op, to.dtype)
        if to.readonly:
            raise BufferError(
                f"codec {self.spec}",
                expected="a buffer that may be written",
                got="a read-only one",
                remedy="Pass a copy that may be written.",
            )
        if nbytes > source.nbytes:
            raise self.broken(to.count, f"{source.nbytes} of {nbytes} bytes")

    def _check_place(self, buffer: Buffer, stream: Stream) -> None:
        if buffer.device != stream.device.name or not buffer.contiguous:
            layout = "contiguous" if buffer.contiguous else "strided"
            raise BufferError(
                f"codec {self.spec}",
                expected=f"contiguous elements on {stream.device.name}, where the stream is",
                got=f"{layout} ones on {buffer.device}",
                remedy="Use a stream of the buffer's device, and pack strided elements first.",
            )

    def decode(self, source: Memory, nbytes: int, to: Buffer, stream: Stream) -> Pending:
        """Queue the decoding of `nbytes` of `source` into `to`."""
        return self.decode_reduce(source, nbytes, to, "replace", stream)

    def broken(self, count: int, got: str) -> StreamError:
        """Make the error for bytes that are no encoding of `count` elements."""
        return StreamError(
            f"codec {self.spec}",
            expected=f"a stream of {count} elements",
            got=got,
            remedy="The bytes were damaged or cut short on their way, or another codec wrote them.",
        )

    def refuse(self, count: int, got: str) -> Pending:
        """Answer at once that the bytes are no encoding of `count` elements."""

        def answer() -> None:
            raise self.broken(count, got)

        return Pending(_at_once, answer)

    def decoded(self, count: int, nbytes: int, size: int, status: int) -> int:
        """Read a decoder's answer: the bytes that were used."""
        if status & BAD_STREAM:
            raise self.broken(count, "bytes that are none")
        return nbytes

    @staticmethod
    def after(stream: Stream, nbytes: int) -> Pending:
        """Answer `nbytes` when the stream has come so far."""
        event = stream.record()

        def answer() -> int:
            event.wait()
            return nbytes

        return Pending(event.done, answer)

    @staticmethod
    def empty() -> Pending:
        """Answer at once: no elements are no bytes."""
        return Pending(_at_once, partial(int, 0))


def _at_once() -> bool:
    return True


def _outlast(memory: Memory) -> None:
    """Do nothing: a stream keeps what its queued work refers to."""
