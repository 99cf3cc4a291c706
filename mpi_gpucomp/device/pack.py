"""Strided elements to contiguous memory and back, and many small tensors to one bucket and back, one launch each."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from mpi_gpucomp.device.buffer import coalesce
from mpi_gpucomp.errors import BufferSpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.device.base import Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer

__all__ = ["Bucket", "gather", "scatter"]

TILE = 1024
PIECE = 1 << 16
"""Bytes that one tile of a bucket moves at most."""


def gather(source: Buffer, to: Memory, stream: Stream) -> None:
    """Queue the copying of a buffer's elements, in C order, into contiguous memory."""
    _check(source, to, stream)
    _move("gather", source, to, stream)


def scatter(source: Memory, to: Buffer, stream: Stream) -> None:
    """Queue the copying of contiguous elements to where a buffer's elements are."""
    _check(to, source, stream)
    _move("scatter", to, source, stream)


def _move(way: str, strided: Buffer, contiguous: Memory, stream: Stream) -> None:
    """Queue the kernel; a buffer without gaps is a plain copy."""
    if strided.strides is None:
        ends = (contiguous.address, strided.address) if way == "gather" else (strided.address, contiguous.address)
        stream.copy(*ends, strided.nbytes)
        return
    shape, strides = coalesce(strided.shape, strided.strides, strided.dtype.itemsize)
    layout = _numbers((*shape, *strides), stream)
    args = (contiguous.address, strided.count, len(shape), layout.address, layout.address + 8 * len(shape))
    kernel = f"pack_{way}_{strided.dtype.itemsize}"
    stream.launch(kernel, -(-strided.count // TILE), strided.address, *args)
    stream.release(layout)


def _numbers(values: Sequence[int], stream: Stream) -> Memory:
    """Put whole numbers where kernels of the stream's device can read them."""
    memory = stream.device.pinned(8 * len(values))
    (ctypes.c_int64 * len(values)).from_address(memory.address)[:] = list(values)
    return memory


def _check(buffer: Buffer, contiguous: Memory, stream: Stream) -> None:
    if buffer.device != stream.device.name or contiguous.nbytes < buffer.nbytes:
        raise BufferSpecError(
            "packing",
            expected=f"elements on {stream.device.name}, where the stream is, and {buffer.nbytes} bytes for them",
            got=f"elements on {buffer.device} and {contiguous.nbytes} bytes",
            remedy="Use a stream of the buffer's device, and memory for all of its elements.",
        )


class Bucket:
    """Many contiguous buffers that travel as one: their bytes one behind the other, each at a multiple of 16."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        """Lay the buffers out; they stay what they are."""
        self._pieces: list[int] = []
        self.nbytes = 0
        """Bytes of the whole bucket."""
        for number, buffer in enumerate(buffers):
            if buffer.strides is not None or buffer.device != buffers[0].device:
                layout = "contiguous" if buffer.contiguous else "strided"
                raise BufferSpecError(
                    f"buffer {number} of a bucket",
                    expected=f"contiguous elements on {buffers[0].device}, where the first buffer is",
                    got=f"{layout} ones on {buffer.device}",
                    remedy="Gather strided elements first, and make a bucket for each device.",
                )
            for at in range(0, buffer.nbytes, PIECE):
                self._pieces += (buffer.address + at, self.nbytes + at, min(PIECE, buffer.nbytes - at))
            self.nbytes += -(-buffer.nbytes // 16) * 16

    def fill(self, bucket: Memory, stream: Stream) -> None:
        """Queue the copying of all buffers into the bucket."""
        self._move(bucket, stream, 0)

    def empty(self, bucket: Memory, stream: Stream) -> None:
        """Queue the copying of the bucket's bytes back to the buffers."""
        self._move(bucket, stream, 1)

    def _move(self, bucket: Memory, stream: Stream, direction: int) -> None:
        if bucket.nbytes < self.nbytes:
            raise BufferSpecError(
                "bucket",
                expected=f"memory of {self.nbytes} bytes",
                got=f"{bucket.nbytes}",
                remedy="Take as many bytes as its nbytes says.",
            )
        pieces = _numbers(self._pieces, stream)
        count = len(self._pieces) // 3
        stream.launch("pack_bucket", count, pieces.address, count, bucket.address, direction)
        stream.release(pieces)
