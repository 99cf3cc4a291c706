"""Encodes elements into frames in memory that the wire can access, and decodes them.

On the host, and with a GPU-aware wire, a frame is encoded where it is sent from. Otherwise the encoded bytes are copied
to pinned memory: the traffic on the bus is compressed too, and any MPI library can send it.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, cast

from mpi_gpucomp.codec import frame
from mpi_gpucomp.codec.raw import Raw
from mpi_gpucomp.device import get_device
from mpi_gpucomp.device.cuda import CudaDevice, CudaStream
from mpi_gpucomp.device.host import HostDevice, InlineStream
from mpi_gpucomp.trace import no_annotation

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from mpi_gpucomp.codec import Codec, Pending
    from mpi_gpucomp.codec.frame import FrameHeader
    from mpi_gpucomp.device import Buffer, Device, DType, Memory, Stream

    Waiting = Generator[Callable[[], bool], None, int]
    Annotate = Callable[[str, str], AbstractContextManager[None]]

__all__ = ["INLINE_BYTES", "Coder"]

HOST = cast(HostDevice, get_device("host"))
RAW = Raw()
INLINE_BYTES = 1 << 16
"""Chunks below this size are encoded and decoded by the waiting thread."""


class Coder:
    """Encodes and decodes for one task, in the order of one stream."""

    def __init__(
        self,
        codec: Codec,
        device: Device,
        *,
        inline: bool = False,
        wire_reaches_gpu: bool = False,
        annotate: Annotate = no_annotation,
    ) -> None:
        """Create a stream on the elements' device; on the host, `inline` runs it in the calling thread.

        On a GPU the stream is taken from those that are free until `close`, so that coders do not wait for each other.
        `annotate(name, device)` returns a context that names the work queued in it, for profilers.
        """
        self.codec, self.device, self.inline = codec, device, inline
        self._direct = device is HOST or wire_reaches_gpu
        self._inline = InlineStream(HOST)
        self.stream = self._inline if inline and device is HOST else _take_stream(device)
        self._encoding, self._decoding = (
            annotate(f"{what} {codec.name}", device.name) for what in ("encode", "decode")
        )

    def room(self, count: int, dtype: DType) -> int:
        """Return the bytes that a frame of `count` elements never exceeds."""
        return frame.max_frame_bytes(self.codec, count, dtype)

    def memory(self, nbytes: int) -> Memory:
        """Allocate memory for a frame that the wire and the device can access."""
        return self.device.alloc(nbytes) if self._direct else self.device.pinned(nbytes)

    def encode(self, source: Buffer, to: Memory, sequence: int, *, raw: bool = False) -> Waiting:
        """Encode a chunk as a frame, or copy it into one (`raw`).

        A generator that yields the condition it waits for and returns the frame's length.
        """
        codec = self.codec if raw else (yield from self.codec.choose(source, self.stream))
        local = to if self._direct else self.device.alloc(to.nbytes)
        with self._encoding:
            pending = frame.encode(codec, source, local, sequence, self.stream, raw=raw)
        yield pending.done
        nbytes = pending.result() or 0
        if self.device is HOST:
            return nbytes
        if local is not to:
            self.stream.copy(to.address, local.address, nbytes)
            self.stream.release(local)
        ready = self.stream.record()  # the header was written after the payload
        yield ready.done
        ready.wait()
        return nbytes

    @property
    def works_in_place(self) -> bool:
        """Return True if messages can be sent from and received into the elements' memory."""
        return self.device is HOST

    @property
    def wire_reaches(self) -> bool:
        """Return True if the wire can access the elements' memory."""
        return self._direct

    def copy(self, source: Buffer, to: Memory) -> Waiting:
        """Copy a raw chunk to memory of the wire; a generator like `encode`."""
        self.stream.copy(to.address, source.address, source.nbytes)
        copied = self.stream.record()
        yield copied.done
        copied.wait()
        return source.nbytes

    def place(self, received: Memory, to: Buffer, op: str) -> Pending:
        """Queue the storing or reduction of a raw chunk."""
        local = received
        if not self._direct and op != "replace":
            local = self.device.alloc(received.nbytes)
            self.stream.copy(local.address, received.address, received.nbytes)
        pending = RAW.decode_reduce(local, received.nbytes, to, op, self.stream)
        if local is not received:
            self.stream.release(local)
        return pending

    def header(self, framed: Memory, where: str) -> FrameHeader:
        """Read the header of a frame."""
        if self._direct and self.device is not HOST:
            return frame.read_header(framed, self.stream, where=where)
        return frame.parse(ctypes.string_at(framed.address, min(framed.nbytes, frame.HEADER_BYTES)), where=where)

    def open(self, received: Memory, where: str) -> FrameHeader:
        """Read the header of a received frame, and verify the payload."""
        header = self.header(received, where)
        local = self.stream if self._direct and self.device is not HOST else self._inline
        frame.verify(header, received, local, where=where)
        return header

    def decode(self, header: FrameHeader, received: Memory, to: Buffer, op: str, sequence: int, where: str) -> Pending:
        """Queue the decoding of an opened frame."""
        local = received
        if not self._direct:
            local = self.device.alloc(received.nbytes)
            self.stream.copy(local.address, received.address, received.nbytes)
        codec = self.codec.decoder(header.wire_id)
        with self._decoding:
            pending = frame.decode(
                codec, header, local, to, self.stream, op=op, sequence=sequence, where=where, verified=True
            )
        if local is not received:
            self.stream.release(local)
        return pending

    def close(self) -> None:
        """End the stream, or give it back to its GPU."""
        if isinstance(self.device, CudaDevice) and isinstance(self.stream, CudaStream):
            self.device.give_back_stream(self.stream)
        else:
            self.stream.close()


def _take_stream(device: Device) -> Stream:
    return device.take_stream() if isinstance(device, CudaDevice) else device.stream()
