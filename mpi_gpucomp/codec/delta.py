"""Lossless: what has changed since a version that both sides have. For the same tensors, sent again and again.

It has no spec of its own for other calls: whoever makes one keeps the base, and sees that all ranks have the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mpi_gpucomp.codec.kernel_codec import TiledCodec, Tiling
from mpi_gpucomp.codec.split import Split
from mpi_gpucomp.device.base import DTYPES
from mpi_gpucomp.errors import BufferSpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from mpi_gpucomp.codec.base import Codec, Pending
    from mpi_gpucomp.codec.kernel_codec import EncodeJob
    from mpi_gpucomp.device.base import DType, Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer

__all__ = ["Delta"]

VALUES, BLOCKS = 1024, 32
WHOLE = Split()
"""What elements are encoded by where too much has changed."""
SAMPLE = 1 << 15
TILINGS = {size: Tiling(VALUES, slot=BLOCKS + VALUES * size) for size in (2, 4, 8)}


class Delta(TiledCodec):
    """The elements of one buffer, as differences from a base that is as long; parts of the buffer are found in it."""

    name: ClassVar[str] = "delta"
    lossless: ClassVar[bool] = True
    shared: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = tuple(
        dtype.name for dtype in DTYPES if dtype.itemsize in TILINGS and dtype.kind != "c"
    )

    def __init__(self, buffer: Buffer, base: Memory) -> None:
        """Encode and decode parts of `buffer`; what it held at the version that all have is in `base`."""
        self.check_dtype(buffer.dtype)
        self._buffer, self._base = buffer, base

    @property
    def spec(self) -> str:
        """The name."""
        return "delta"

    @property
    def wire_id(self) -> int:
        """Family and version."""
        return 0x07 << 24 | 1 << 16

    def tiling(self, dtype: DType) -> Tiling:
        """Tiles of 32 blocks, each with a byte for its width."""
        return TILINGS[dtype.itemsize]

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Leave room for the elements by themselves too."""
        whole = WHOLE.max_encoded(count, dtype) if dtype.name in WHOLE.dtypes else 0
        return max(super().max_encoded(count, dtype), whole)

    def choose(self, source: Buffer, stream: Stream) -> Generator[Callable[[], bool], None, Codec]:
        """Try a piece: where nearly everything has changed, the elements by themselves may be shorter."""
        if source.dtype.name not in WHOLE.dtypes or source.count < SAMPLE:
            return self
        piece = source.slice((source.count - SAMPLE) // 2, SAMPLE)
        rooms = [stream.device.alloc(codec.max_encoded(SAMPLE, piece.dtype)) for codec in (self, WHOLE)]
        tried = [codec.encode(piece, room, stream) for codec, room in zip((self, WHOLE), rooms, strict=True)]
        for room in rooms:
            stream.release(room)
        yield lambda: all(pending.done() for pending in tried)
        changes, whole = (pending.result() or piece.nbytes for pending in tried)
        return self if changes <= whole else WHOLE

    def decoder(self, wire_id: int) -> Codec:
        """Return the codec that a chunk was encoded by."""
        return WHOLE if wire_id == WHOLE.wire_id else self

    def encode_tiles(self, job: EncodeJob, stream: Stream) -> None:
        """Queue the packing of the differences."""
        source = job.source
        args = (source.address, self._base_of(source), source.count, job.slots, job.sizes, job.starts)
        stream.launch(f"delta_encode_{_word(source.dtype)}", job.tiles, *args)

    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        """Queue the decoding; a version can only take the place of another."""
        if op != "replace":
            raise BufferSpecError(
                "codec delta", expected="the operation replace", got=op, remedy="Choose another codec for reductions."
            )
        return super().decode_reduce(source, nbytes, to, op, stream)

    def decode_tiles(
        self, header: int, tiles: int, offsets: int, extra: int, to: Buffer, op: int, status: int, stream: Stream
    ) -> None:
        """Queue the unpacking, onto the base's values."""
        args = (tiles, offsets, self._base_of(to), to.count, to.address, status)
        stream.launch(f"delta_decode_{_word(to.dtype)}", self.tiling(to.dtype).tiles(to.count), *args)

    def _base_of(self, part: Buffer) -> int:
        """Return where the base has the elements that stand in a part of the buffer."""
        start = part.address - self._buffer.address
        if not 0 <= start <= start + part.nbytes <= self._buffer.nbytes:
            raise BufferSpecError(
                "codec delta",
                expected="elements of the buffer that it was made for",
                got=repr(part),
                remedy="Pass the same contiguous buffer every time.",
            )
        return self._base.address + start


def _word(dtype: DType) -> str:
    return f"u{8 * dtype.itemsize}"
