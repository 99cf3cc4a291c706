"""The codec `delta`: lossless differences from a version that all ranks hold. For tensors that are sent repeatedly.

It is not in the registry: the caller creates it, keeps the base, and ensures that all ranks have the same one.
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
    from mpi_gpucomp.codec.kernel_codec import DecodeJob, EncodeJob
    from mpi_gpucomp.device.base import DType, Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer

__all__ = ["Delta"]

VALUES, BLOCKS = 1024, 32
FULL = Split()
"""The codec for chunks in which too much has changed."""
SAMPLE = 1 << 15
TILINGS = {size: Tiling(VALUES, slot=BLOCKS + VALUES * size) for size in (2, 4, 8)}


class Delta(TiledCodec):
    """Differences between a buffer and a base of the same size; encodes and decodes slices of that buffer only."""

    name: ClassVar[str] = "delta"
    lossless: ClassVar[bool] = True
    shared: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = tuple(
        dtype.name for dtype in DTYPES if dtype.itemsize in TILINGS and dtype.kind != "c"
    )

    def __init__(self, buffer: Buffer, base: Memory) -> None:
        """Encode and decode slices of `buffer`; `base` holds its contents at the version that all ranks have."""
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
        """Return tiles of 32 blocks, each with a byte for its width."""
        return TILINGS[dtype.itemsize]

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return a bound that also holds for `FULL`."""
        full = FULL.max_encoded(count, dtype) if dtype.name in FULL.dtypes else 0
        return max(super().max_encoded(count, dtype), full)

    def choose(self, source: Buffer, stream: Stream) -> Generator[Callable[[], bool], None, Codec]:
        """Encode a sample with both codecs and choose the one with the shorter result."""
        if source.dtype.name not in FULL.dtypes or source.count < SAMPLE:
            return self
        sample = source.slice((source.count - SAMPLE) // 2, SAMPLE)
        memories = [stream.device.alloc(codec.max_encoded(SAMPLE, sample.dtype)) for codec in (self, FULL)]
        tried = [codec.encode(sample, memory, stream) for codec, memory in zip((self, FULL), memories, strict=True)]
        for memory in memories:
            stream.release(memory)
        yield lambda: all(pending.done() for pending in tried)
        changes, full = (pending.result() or sample.nbytes for pending in tried)
        return self if changes <= full else FULL

    def decoder(self, wire_id: int) -> Codec:
        """Return the codec that a chunk was encoded with."""
        return FULL if wire_id == FULL.wire_id else self

    def encode_tiles(self, job: EncodeJob, stream: Stream) -> None:
        """Queue the encoding kernel."""
        source = job.source
        args = (source.address, self._base_address(source), source.count, job.slots, job.sizes, job.starts)
        stream.launch(f"delta_encode_{_unsigned_suffix(source.dtype)}", job.tiles, *args)

    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        """Queue the decoding; only `replace` is defined for versions."""
        if op != "replace":
            raise BufferSpecError(
                "codec delta", expected="the operation replace", got=op, remedy="Choose another codec for reductions."
            )
        return super().decode_reduce(source, nbytes, to, op, stream)

    def decode_tiles(self, job: DecodeJob, to: Buffer, op: int, stream: Stream) -> None:
        """Queue the decoding kernel, which adds the base."""
        base, tiles = self._base_address(to), self.tiling(to.dtype).tiles(to.count)
        args = (job.sizes, job.tiles, job.available, base, to.count, to.address, job.status)
        stream.launch(f"delta_decode_{_unsigned_suffix(to.dtype)}", tiles, *args)

    def _base_address(self, part: Buffer) -> int:
        """Return the address in the base that corresponds to a slice of the buffer."""
        start = part.address - self._buffer.address
        if not 0 <= start <= start + part.nbytes <= self._buffer.nbytes:
            raise BufferSpecError(
                "codec delta",
                expected="a slice of the buffer that the codec was created for",
                got=repr(part),
                remedy="Pass the same contiguous buffer in every call.",
            )
        return self._base.address + start


def _unsigned_suffix(dtype: DType) -> str:
    return f"u{8 * dtype.itemsize}"
