"""Packs strided elements into contiguous memory and many small buffers into one bucket, and back; one launch each."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from mpi_gpucomp.device.buffer import coalesce_dimensions
from mpi_gpucomp.errors import BufferSpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.device.base import Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer

__all__ = ["Bucket", "gather", "scatter"]

TILE = 1024
COPY_BYTES = 1 << 16
"""Maximum bytes that one tile of a bucket kernel copies."""


def gather(source: Buffer, to: Memory, stream: Stream) -> None:
    """Queue the packing of a buffer's elements, in C order, into contiguous memory."""
    _check(source, to, stream)
    _launch("gather", source, to, stream)


def scatter(source: Memory, to: Buffer, stream: Stream) -> None:
    """Queue the unpacking of contiguous elements into a buffer."""
    _check(to, source, stream)
    _launch("scatter", to, source, stream)


def _launch(direction: str, strided: Buffer, contiguous: Memory, stream: Stream) -> None:
    """Queue the kernel, or a copy for a contiguous buffer."""
    if strided.strides is None:
        ends = (contiguous.address, strided.address) if direction == "gather" else (strided.address, contiguous.address)
        stream.copy(*ends, strided.nbytes)
        return
    shape, strides = coalesce_dimensions(strided.shape, strided.strides, strided.dtype.itemsize)
    layout = _upload_integers((*shape, *strides), stream)
    args = (contiguous.address, strided.count, len(shape), layout.address, layout.address + 8 * len(shape))
    kernel = f"pack_{direction}_{strided.dtype.itemsize}"
    stream.launch(kernel, -(-strided.count // TILE), strided.address, *args)
    stream.release(layout)


def _upload_integers(values: Sequence[int], stream: Stream) -> Memory:
    """Store integers in memory that kernels of the stream's device can read."""
    memory = stream.device.pinned(8 * len(values))
    (ctypes.c_int64 * len(values)).from_address(memory.address)[:] = list(values)
    return memory


def _check(buffer: Buffer, contiguous: Memory, stream: Stream) -> None:
    if buffer.device != stream.device.name:
        raise BufferSpecError(
            "packing",
            expected=f"elements on {stream.device.name}, the stream's device",
            got=f"elements on {buffer.device}",
            remedy="Use a stream of the buffer's device.",
        )
    if contiguous.nbytes < buffer.nbytes:
        raise BufferSpecError(
            "packing",
            expected=f"memory of {buffer.nbytes} bytes for the packed elements",
            got=f"{contiguous.nbytes}",
            remedy="Allocate memory for all elements.",
        )


class Bucket:
    """Many contiguous buffers packed into one: back to back, each aligned to 16 bytes."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        """Lay out the buffers; copies nothing."""
        self._copies: list[int] = []
        self.nbytes = 0
        """Size of the bucket in bytes."""
        for number, buffer in enumerate(buffers):
            if buffer.strides is not None or buffer.device != buffers[0].device:
                layout = "contiguous" if buffer.contiguous else "strided"
                raise BufferSpecError(
                    f"buffer {number} of a bucket",
                    expected=f"contiguous elements on {buffers[0].device}, the first buffer's device",
                    got=f"{layout} ones on {buffer.device}",
                    remedy="Gather strided elements first, and use one bucket per device.",
                )
            for at in range(0, buffer.nbytes, COPY_BYTES):
                self._copies += (buffer.address + at, self.nbytes + at, min(COPY_BYTES, buffer.nbytes - at))
            self.nbytes += -(-buffer.nbytes // 16) * 16

    def fill(self, bucket: Memory, stream: Stream) -> None:
        """Queue the copy of all buffers into the bucket."""
        self._launch(bucket, stream, 0)

    def empty(self, bucket: Memory, stream: Stream) -> None:
        """Queue the copy of the bucket back to the buffers."""
        self._launch(bucket, stream, 1)

    def _launch(self, bucket: Memory, stream: Stream, direction: int) -> None:
        if bucket.nbytes < self.nbytes:
            raise BufferSpecError(
                "bucket",
                expected=f"memory of {self.nbytes} bytes",
                got=f"{bucket.nbytes}",
                remedy="Allocate Bucket.nbytes bytes.",
            )
        table = _upload_integers(self._copies, stream)
        count = len(self._copies) // 3
        stream.launch("pack_bucket", count, table.address, count, bucket.address, direction)
        stream.release(table)
