"""The codec `bound`: the error of every value is at most a bound, absolute or relative to the chunk's range."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mpi_gpucomp.codec.kernel_codec import Parameters, TiledCodec, Tiling, float_parameter
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from mpi_gpucomp.codec.kernel_codec import DecodeJob, EncodeJob
    from mpi_gpucomp.device.base import DType, Stream
    from mpi_gpucomp.device.buffer import Buffer

__all__ = ["Bound"]

VALUES, BLOCKS = 1024, 32
TILINGS = {size: Tiling(VALUES, slot=BLOCKS + VALUES * size, header=16) for size in (2, 4, 8)}


class Bound(TiledCodec):
    """Values as multiples of a step, in blocks of 32; NaN, infinity and values that would miss the bound are exact."""

    name: ClassVar[str] = "bound"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16", "float32", "float64")
    parameters: ClassVar[Parameters] = Parameters(
        required=True,
        abs=float_parameter(0, None, "the largest error, above 0", exclude_low=True),
        rel=float_parameter(
            *(0, 1, "the largest error as a fraction of the chunk's range, above 0, below 1"),
            exclude_low=True,
            exclude_high=True,
        ),
    )

    def __init__(self, abs: float | None = None, rel: float | None = None) -> None:
        """Set the bound: exactly one of the two."""
        if (abs is None) == (rel is None):
            raise SpecError(
                "codec bound",
                expected="either abs= or rel=",
                got="neither" if abs is None else "both",
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
        """Return tiles of 32 blocks, each with a byte for its packing."""
        return TILINGS[dtype.itemsize]

    def encode_scratch_bytes(self, count: int, dtype: DType) -> int:
        """Return the bytes for the number of tiles whose range is known, and the minimum and maximum of each."""
        return 0 if self.rel is None else 8 + 16 * self.tiling(dtype).tiles(count)

    def encode_tiles(self, job: EncodeJob, stream: Stream) -> None:
        """Queue the search for the range if the bound is relative, then the encoding kernel."""
        source, suffix = job.source, job.source.dtype.suffix
        # Decoded values of a 16-bit type are rounded to it: half of the bound is reserved for that.
        steps = 1.0 if source.dtype.itemsize == 2 else 2.0
        if self.rel is not None:
            done, ranges = job.scratch, job.scratch + 8
            stream.fill(done, 0, 8)
            found = (self.rel, steps, ranges, done, job.header)
            stream.launch(f"bound_range_{suffix}", job.tiles, source.address, source.count, *found)
        bound = self.abs or 0.0  # 0: the header is there
        args = (source.address, source.count, bound, steps, job.header, job.slots, job.sizes, job.starts)
        stream.launch(f"bound_encode_{suffix}", job.tiles, *args)

    def decode_tiles(self, job: DecodeJob, to: Buffer, op: int, stream: Stream) -> None:
        """Queue the decoding kernel."""
        args = (job.header, job.sizes, job.tiles, job.available, to.count, to.address, op, job.status)
        stream.launch(f"bound_decode_{to.dtype.suffix}", self.tiling(to.dtype).tiles(to.count), *args)
