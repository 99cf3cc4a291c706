"""The codec `split`: lossless for floats, with entropy-coded exponents and raw signs and mantissas."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mpi_gpucomp.codec.base import Pending
from mpi_gpucomp.codec.kernel_codec import TiledCodec, Tiling

if TYPE_CHECKING:
    from mpi_gpucomp.codec.kernel_codec import EncodeJob
    from mpi_gpucomp.device.base import DType, Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer

__all__ = ["Split"]

SCALE = 4096
SYMBOLS = {"float16": 32, "bfloat16": 256, "float32": 256, "float64": 2048}
RAW_BYTES = {"float16": 44, "bfloat16": 32, "float32": 96, "float64": 212}
"""Bytes of the signs and mantissas of 32 values."""


def _tiling(name: str) -> Tiling:
    groups = 512 if name in ("float16", "bfloat16") else 1024
    slot = 128 + groups * RAW_BYTES[name] + 64 * groups + 32
    return Tiling(32 * groups, slot, table=4 + 2 * SYMBOLS[name], grain=2)


TILINGS = {name: _tiling(name) for name in SYMBOLS}


class Split(TiledCodec):
    """Interleaved rANS over exponents, with one frequency table per chunk. For weights and gradients."""

    name: ClassVar[str] = "split"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16", "float32", "float64")

    @property
    def spec(self) -> str:
        """The name."""
        return "split"

    @property
    def wire_id(self) -> int:
        """Family and version."""
        return 0x04 << 24 | 1 << 16

    def tiling(self, dtype: DType) -> Tiling:
        """Return large tiles: each has the overhead of 32 rANS states."""
        return TILINGS[dtype.name]

    def encode_scratch_bytes(self, count: int, dtype: DType) -> int:
        """Return the bytes for the histogram of exponents and the encoder's table."""
        return 3 * 4 * SYMBOLS[dtype.name]

    def decode_scratch_bytes(self, dtype: DType) -> int:
        """Return the bytes for the decoder's lookup table."""
        return SCALE * (8 if dtype.name == "float64" else 4)

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the encoding; buffers of 2**32 elements or more are sent raw."""
        if source.count < 1 << 32:
            return super().encode(source, to, stream)
        return Pending(lambda: True, lambda: None)

    def encode_tiles(self, job: EncodeJob, stream: Stream) -> None:
        """Queue the histogram, the table and the encoding kernel."""
        source, suffix, symbols = job.source, job.source.dtype.suffix, SYMBOLS[job.source.dtype.name]
        counts, table = job.scratch, job.scratch + 4 * symbols
        addresses, grain = (job.slots, job.sizes, job.starts), self.tiling(source.dtype).grain
        stream.fill(counts, 0, 4 * symbols)
        stream.launch(f"split_count_{suffix}", job.tiles, source.address, source.count, counts, grain=grain)
        stream.launch(f"split_tables_{suffix}", 1, counts, source.count, table, *addresses)
        stream.launch(f"split_encode_{suffix}", job.tiles, source.address, source.count, table, *addresses, grain=grain)

    def decode_tiles(
        self, header: int, tiles: int, offsets: int, scratch: int, to: Buffer, op: int, status: int, stream: Stream
    ) -> None:
        """Queue the lookup table and the decoding kernel."""
        suffix, tiling = to.dtype.suffix, self.tiling(to.dtype)
        stream.launch(f"split_open_{suffix}", 1, tiles, offsets, scratch, status)
        args = (tiles, offsets, scratch, to.count, to.address, op, status)
        stream.launch(f"split_decode_{suffix}", tiling.tiles(to.count), *args, grain=tiling.grain)
