"""Error-bounded: no value is further from what it was than a bound, absolute or relative to the chunk's range."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mpi_gpucomp.codec.kernel_codec import Parameters, TiledCodec, Tiling, number
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from mpi_gpucomp.codec.kernel_codec import EncodeJob
    from mpi_gpucomp.device.base import DType, Stream
    from mpi_gpucomp.device.buffer import Buffer

__all__ = ["Bound"]

VALUES, BLOCKS = 1024, 32
TILINGS = {size: Tiling(VALUES, slot=BLOCKS + VALUES * size, header=16) for size in (2, 4, 8)}


class Bound(TiledCodec):
    """Values as multiples of a step, in blocks of 32; NaN, infinity and what cannot meet the bound are kept exactly."""

    name: ClassVar[str] = "bound"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16", "float32", "float64")
    parameters: ClassVar[Parameters] = Parameters(
        needed=True,
        abs=number(0, None, "the largest error, above 0", above=True),
        rel=number(0, 1, "the largest error as a share of the chunk's range, above 0, below 1", above=True, below=True),
    )

    def __init__(self, abs: float | None = None, rel: float | None = None) -> None:
        """Fix the bound: one of the two."""
        if (abs is None) == (rel is None):
            raise SpecError(
                "codec bound",
                expected="one of abs= and rel=",
                got="none" if abs is None else "both",
                remedy="Write for example bound:abs=1e-3 or bound:rel=1e-4.",
            )
        self.abs, self.rel = (None if bound is None else float(bound) for bound in (abs, rel))

    @property
    def spec(self) -> str:
        """The name and the bound."""
        return f"bound:abs={self.abs!r}" if self.abs is not None else f"bound:rel={self.rel!r}"

    @property
    def wire_id(self) -> int:
        """Family and version: the step is in the stream."""
        return 0x03 << 24 | 1 << 16

    def tiling(self, dtype: DType) -> Tiling:
        """Tiles of 32 blocks, each with a byte that says how it is packed."""
        return TILINGS[dtype.itemsize]

    def encode_extra(self, count: int, dtype: DType) -> int:
        """Room for the least and greatest value of each tile."""
        return 0 if self.rel is None else 16 * self.tiling(dtype).tiles(count)

    def encode_tiles(self, job: EncodeJob, stream: Stream) -> None:
        """Queue the search for the range if the bound is relative to it, then the packing."""
        source, suffix = job.source, job.source.dtype.suffix
        # Decoded values of a 16-bit type are rounded to it: half of the bound is left for that.
        steps = 1.0 if source.dtype.itemsize == 2 else 2.0
        if self.rel is not None:
            stream.launch(f"bound_range_{suffix}", job.tiles, source.address, source.count, job.extra)
            stream.launch("bound_header", 1, job.extra, job.tiles, self.rel, steps, job.header)
        else:
            stream.launch("bound_header", 1, 0, 0, float(self.abs or 0), steps, job.header)
        where = (job.header, job.slots, job.sizes, job.starts)
        stream.launch(f"bound_encode_{suffix}", job.tiles, source.address, source.count, *where)

    def decode_tiles(
        self, header: int, tiles: int, offsets: int, extra: int, to: Buffer, op: int, status: int, stream: Stream
    ) -> None:
        """Queue the unpacking."""
        args = (header, tiles, offsets, to.count, to.address, op, status)
        stream.launch(f"bound_decode_{to.dtype.suffix}", self.tiling(to.dtype).tiles(to.count), *args)
