"""Codecs whose streams are tiles of varying size: the sizes first, then the tiles (kernels/tiles.h)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mpi_gpucomp.codec.base import OPS
from mpi_gpucomp.codec.kernel import KernelCodec, Mailbox

if TYPE_CHECKING:
    from mpi_gpucomp.codec.base import Pending
    from mpi_gpucomp.device.base import Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer
    from mpi_gpucomp.device.dtype import DType

__all__ = ["EncodeJob", "TiledCodec", "Tiling"]


@dataclass(frozen=True)
class Tiling:
    """How elements of one type are cut into tiles, and the bytes that go with them."""

    values: int
    """Elements in a tile."""
    slot: int
    """Bytes that an encoded tile never exceeds."""
    header: int = 0
    """Bytes in front of everything."""
    table: int = 0
    """Bytes that a table never exceeds, which then travels as one more tile before the others."""
    grain: int = 64
    """The fewest tiles that are worth waking another core for."""

    def tiles(self, count: int) -> int:
        """Count the tiles of elements."""
        return -(-count // self.values)

    def entries(self, count: int) -> int:
        """Count the tiles, the table's included."""
        return self.tiles(count) + bool(self.table)

    def end_of_sizes(self, count: int) -> int:
        """Bytes of the header and the sizes."""
        return self.header + 4 * self.entries(count)

    def front(self, count: int) -> int:
        """Bytes before the first tile: the header and the sizes, so that tiles start at a multiple of 8."""
        return -(-self.end_of_sizes(count) // 8) * 8

    def room(self, count: int) -> int:
        """Bytes that all tiles never exceed."""
        return self.table + self.tiles(count) * self.slot


@dataclass(frozen=True)
class EncodeJob:
    """The addresses that an encoder's kernels work with."""

    source: Buffer
    tiles: int
    header: int
    sizes: int
    starts: int
    slots: int
    extra: int


class TiledCodec(KernelCodec):
    """A codec with a stream of tiles."""

    @abstractmethod
    def tiling(self, dtype: DType) -> Tiling:
        """Say how elements of this type are cut."""

    @abstractmethod
    def encode_tiles(self, job: EncodeJob, stream: Stream) -> None:
        """Queue the kernels that write the tiles (and the table) to their slots, with their sizes and starts."""

    @abstractmethod
    def decode_tiles(
        self, header: int, tiles: int, offsets: int, extra: int, to: Buffer, op: int, status: int, stream: Stream
    ) -> None:
        """Queue the kernels that read the tiles, whose offsets have been checked, onto `to`."""

    def encode_extra(self, count: int, dtype: DType) -> int:
        """Bytes of scratch memory that `encode_tiles` wants besides."""
        return 0

    def decode_extra(self, dtype: DType) -> int:
        """Bytes of scratch memory that `decode_tiles` wants besides."""
        return 0

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Bytes that an encoding of `count` elements never exceeds."""
        tiling = self.tiling(dtype)
        return tiling.front(count) + tiling.room(count) if count else 0

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the encoding; where tiles get slots of their own, they are joined at the end."""
        self.check_encode(source, to, stream)
        if not source.count:
            return self.empty()
        tiling, count, in_place = self.tiling(source.dtype), source.count, stream.device.appends_in_place
        entries, front = tiling.entries(count), tiling.front(count)
        offsets = 8 * entries
        extra = offsets + 8 * entries
        slots = extra + -(-self.encode_extra(count, source.dtype) // 256) * 256
        scratch = stream.device.alloc(slots + (0 if in_place else tiling.room(count)))
        job = EncodeJob(
            source,
            tiling.tiles(count),
            header=to.address,
            sizes=to.address + tiling.header,
            starts=scratch.address,
            slots=to.address + front if in_place else scratch.address + slots,
            extra=scratch.address + extra,
        )
        mailbox, end_of_sizes = Mailbox(stream), tiling.end_of_sizes(count)
        if end_of_sizes < front:  # what was in this memory before must not travel
            stream.fill(to.address + end_of_sizes, 0, front - end_of_sizes)
        self.encode_tiles(job, stream)
        stream.launch("tiles_offsets", 1, job.sizes, entries, scratch.address + offsets, mailbox.size)
        joined = (job.slots, job.starts, job.sizes, scratch.address + offsets, to.address + front)
        stream.launch("tiles_join", entries, *joined, split=not in_place)
        stream.release(scratch)
        return mailbox.send(stream, lambda size, status: front + size)

    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        """Queue the decoding; nothing in the bytes is believed before it is checked."""
        self.check_decode(source, nbytes, to, op, stream)
        tiling, count = self.tiling(to.dtype), to.count
        front = tiling.front(count) if count else 0
        if nbytes < front or (nbytes and not count):
            return self.refuse(count, f"{nbytes} bytes")
        if not count:
            return self.empty()
        entries = tiling.entries(count)
        extra = 8 * (entries + 1)
        scratch = stream.device.alloc(extra + self.decode_extra(to.dtype))
        mailbox = Mailbox(stream)
        sizes, tiles = source.address + tiling.header, source.address + front
        largest = max(tiling.slot, tiling.table)
        stream.launch("tiles_open", 1, sizes, entries, nbytes - front, scratch.address, 4, largest, mailbox.status)
        self.decode_tiles(
            source.address, tiles, scratch.address, scratch.address + extra, to, OPS[op], mailbox.status, stream
        )
        stream.release(scratch)
        return mailbox.send(stream, partial(self.decoded, count, nbytes))
