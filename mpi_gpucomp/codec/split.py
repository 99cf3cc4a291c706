"""The codec `split`: lossless for floats, with entropy-coded exponents and raw signs and mantissas."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mpi_gpucomp.codec.base import Pending
from mpi_gpucomp.codec.kernel_codec import TiledCodec, Tiling

if TYPE_CHECKING:
    from mpi_gpucomp.codec.kernel_codec import DecodeJob, EncodeJob
    from mpi_gpucomp.device.base import DType, Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer

__all__ = ["Split"]

SYMBOLS = {"float16": 32, "bfloat16": 256, "float32": 256, "float64": 2048}
GROUPS = 128
"""Groups of 32 values in a tile."""
RAW_BYTES = {"float16": 44, "bfloat16": 32, "float32": 96, "float64": 212}
"""Bytes of the signs and mantissas of 32 values."""


def _tiling(name: str) -> Tiling:
    slot = 128 + GROUPS * RAW_BYTES[name] + 64 * GROUPS + 32
    return Tiling(32 * GROUPS, slot, table=4 + 2 * SYMBOLS[name], grain=8)


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
        return 0x04 << 24 | 2 << 16

    def tiling(self, dtype: DType) -> Tiling:
        """Return tiles of 4096 values: few enough for a GPU's warps, enough for the overhead of 32 rANS states."""
        return TILINGS[dtype.name]

    def encode_scratch_bytes(self, count: int, dtype: DType) -> int:
        """Return the bytes for the number of tiles counted, the histogram of exponents, and the encoder's table."""
        return 3 * 4 * SYMBOLS[dtype.name] + 8

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the encoding; buffers of 2**32 elements or more are sent raw."""
        if source.count < 1 << 32:
            return super().encode(source, to, stream)
        return Pending(lambda: True, lambda: None)

    def encode_tiles(self, job: EncodeJob, stream: Stream) -> None:
        """Queue the kernel that counts exponents and makes the table, and the one that encodes."""
        source, suffix, symbols = job.source, job.source.dtype.suffix, SYMBOLS[job.source.dtype.name]
        done, counts = job.scratch, job.scratch + 8
        table = counts + 4 * symbols
        addresses, grain = (table, job.slots, job.sizes, job.starts), self.tiling(source.dtype).grain
        stream.fill(done, 0, 8 + 4 * symbols)
        count = (source.address, source.count, counts, done, *addresses)
        stream.launch(f"split_count_{suffix}", job.tiles, *count, grain=grain)
        stream.launch(f"split_encode_{suffix}", job.tiles, source.address, source.count, *addresses, grain=grain)

    def decode_tiles(self, job: DecodeJob, to: Buffer, op: int, stream: Stream) -> None:
        """Queue the decoding kernel."""
        tiling = self.tiling(to.dtype)
        args = (job.sizes, job.tiles, job.available, to.count, to.address, op, job.status)
        stream.launch(f"split_decode_{to.dtype.suffix}", tiling.tiles(to.count), *args, grain=tiling.grain)
