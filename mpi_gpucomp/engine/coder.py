"""Elements to frames in memory that the wire reaches, and back.

On the host, and on a GPU that the wire reaches, a frame is encoded where it is sent from. Otherwise the encoded bytes
are copied to pinned memory: what crosses the bus is compressed too, and any MPI can send it.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, cast

from mpi_gpucomp.codec import frame
from mpi_gpucomp.codec.raw import Raw
from mpi_gpucomp.device import get_device
from mpi_gpucomp.device.host import HostDevice, InlineStream
from mpi_gpucomp.trace import no_annotation

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from mpi_gpucomp.codec import Codec, Pending
    from mpi_gpucomp.codec.frame import FrameHeader
    from mpi_gpucomp.device import Buffer, Device, DType, Memory

    Waiting = Generator[Callable[[], bool], None, int]
    Annotate = Callable[[str, str], AbstractContextManager[None]]

__all__ = ["INLINE_BYTES", "Coder"]

HOST = cast(HostDevice, get_device("host"))
PLAIN = Raw()
INLINE_BYTES = 1 << 16
"""Chunks below this size are best coded by the thread that waits for them."""


class Coder:
    """Encodes and decodes for one task, on one stream, so that what is queued later sees what was queued before."""

    def __init__(
        self,
        codec: Codec,
        device: Device,
        *,
        inline: bool = False,
        wire_reaches_gpu: bool = False,
        annotate: Annotate = no_annotation,
    ) -> None:
        """Make a stream on the device where the elements are; on the host, `inline` saves small chunks a thread.

        `annotate(name, device)` returns a context that names the work queued in it, for profilers.
        """
        self.codec, self._device = codec, device
        self._direct = device is HOST or wire_reaches_gpu
        self._inline = InlineStream(HOST)
        self.stream = self._inline if inline and device is HOST else device.stream()
        self._encoding, self._decoding = (
            annotate(f"{what} {codec.name}", device.name) for what in ("encode", "decode")
        )

    def room(self, count: int, dtype: DType) -> int:
        """Return the bytes that a frame of `count` elements never exceeds."""
        return frame.max_frame_bytes(self.codec, count, dtype)

    def memory(self, nbytes: int) -> Memory:
        """Take memory for a frame: within reach of the wire and of the device."""
        return self._device.alloc(nbytes) if self._direct else self._device.pinned(nbytes)

    def encode(self, source: Buffer, to: Memory, sequence: int, *, raw: bool = False) -> Waiting:
        """Encode a chunk as a frame, or put it in one as it is (`raw`).

        A generator that yields what it waits for and returns the frame's length.
        """
        codec = self.codec if raw else (yield from self.codec.choose(source, self.stream))
        near = to if self._direct else self._device.alloc(to.nbytes)
        with self._encoding:
            pending = frame.encode(codec, source, near, sequence, self.stream, raw=raw)
        yield pending.done
        nbytes = pending.result() or 0
        if self._device is HOST:
            return nbytes
        if near is not to:
            self.stream.copy(to.address, near.address, nbytes)
            self.stream.release(near)
        ready = self.stream.record()  # the header was written behind the payload
        yield ready.done
        ready.wait()
        return nbytes

    @property
    def works_in_place(self) -> bool:
        """Say whether messages may leave and arrive where the elements are."""
        return self._device is HOST

    def copy(self, source: Buffer, to: Memory) -> Waiting:
        """Copy a chunk as it is to where the wire reaches it; a generator like `encode`."""
        self.stream.copy(to.address, source.address, source.nbytes)
        copied = self.stream.record()
        yield copied.done
        copied.wait()
        return source.nbytes

    def place(self, received: Memory, to: Buffer, op: str) -> Pending:
        """Queue what has arrived as it is to be stored or reduced."""
        near = received
        if not self._direct and op != "replace":
            near = self._device.alloc(received.nbytes)
            self.stream.copy(near.address, received.address, received.nbytes)
        pending = PLAIN.decode_reduce(near, received.nbytes, to, op, self.stream)
        if near is not received:
            self.stream.release(near)
        return pending

    def header(self, framed: Memory, where: str) -> FrameHeader:
        """Read the header of a frame, such as one that was made here."""
        if self._direct and self._device is not HOST:
            return frame.read_header(framed, self.stream, where=where)
        return frame.parse(ctypes.string_at(framed.address, min(framed.nbytes, frame.HEADER_BYTES)), where=where)

    def open(self, received: Memory, where: str) -> FrameHeader:
        """Read and check a frame that has arrived, header and payload."""
        header = self.header(received, where)
        near = self.stream if self._direct and self._device is not HOST else self._inline
        frame.verify(header, received, near, where=where)
        return header

    def decode(self, header: FrameHeader, received: Memory, to: Buffer, op: str, sequence: int, where: str) -> Pending:
        """Queue the decoding of a frame that has been opened."""
        near = received
        if not self._direct:
            near = self._device.alloc(received.nbytes)
            self.stream.copy(near.address, received.address, received.nbytes)
        codec = self.codec.decoder(header.wire_id)
        with self._decoding:
            pending = frame.decode(
                codec, header, near, to, self.stream, op=op, sequence=sequence, where=where, verified=True
            )
        if near is not received:
            self.stream.release(near)
        return pending

    def close(self) -> None:
        """End the stream."""
        self.stream.close()
