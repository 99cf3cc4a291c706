"""The codec `mpc`: lossless, after MPC (differences at a stride, bit planes, zeros omitted). For smooth data."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mpi_gpucomp.codec.kernel_codec import Parameters, TiledCodec, Tiling, int_parameter

if TYPE_CHECKING:
    from mpi_gpucomp.codec.kernel_codec import DecodeJob, EncodeJob
    from mpi_gpucomp.device.base import DType, Stream
    from mpi_gpucomp.device.buffer import Buffer

__all__ = ["Mpc"]

VALUES, BLOCKS = 1024, 32
TILINGS = {size: Tiling(VALUES, slot=(VALUES + BLOCKS) * size) for size in (4, 8)}


class Mpc(TiledCodec):
    """Differences of values that are `stride` apart: the number of interleaved series, such as coordinates."""

    name: ClassVar[str] = "mpc"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64")
    parameters: ClassVar[Parameters] = Parameters(stride=int_parameter(1, 32, "values, 1 to 32"))

    def __init__(self, stride: int = 1) -> None:
        """Set the stride."""
        self.stride = stride

    @property
    def spec(self) -> str:
        """The name, with the stride if it is not 1."""
        return "mpc" if self.stride == 1 else f"mpc:stride={self.stride}"

    @property
    def wire_id(self) -> int:
        """Family, version and stride."""
        return 0x02 << 24 | 1 << 16 | self.stride

    def tiling(self, dtype: DType) -> Tiling:
        """Return tiles of 32 blocks, each with a bitmap of its planes."""
        return TILINGS[dtype.itemsize]

    def encode_tiles(self, job: EncodeJob, stream: Stream) -> None:
        """Queue the encoding kernel."""
        source = job.source
        args = (source.address, source.count, self.stride, job.slots, job.sizes, job.starts)
        stream.launch(f"mpc_encode_{source.dtype.suffix}", job.tiles, *args)

    def decode_tiles(self, job: DecodeJob, to: Buffer, op: int, stream: Stream) -> None:
        """Queue the decoding kernel."""
        args = (job.sizes, job.tiles, job.available, self.stride, to.count, to.address, op, job.status)
        stream.launch(f"mpc_decode_{to.dtype.suffix}", self.tiling(to.dtype).tiles(to.count), *args)
