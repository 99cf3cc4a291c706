"""A general lossless codec: one that sees bytes, or numbers of a width, and knows nothing of the values.

Each call goes to the side that its stream is on: nvCOMP on a GPU, cramjam on the host. A format that has both sides
travels in its plain form, so that each machine, and any other program that knows the format, decodes what the other
wrote. No elements are no bytes. The formats themselves are in `formats`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from mpi_gpucomp.codec import cramjam, nvcomp
from mpi_gpucomp.codec.base import OPS, Codec, Pending
from mpi_gpucomp.codec.none import REDUCE_TILE
from mpi_gpucomp.device.dtype import DTYPES
from mpi_gpucomp.errors import DeviceError, SpecError, StreamError

if TYPE_CHECKING:
    from mpi_gpucomp.codec.nvcomp import Format
    from mpi_gpucomp.device.base import Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer
    from mpi_gpucomp.device.dtype import DType

__all__ = ["GeneralCodec"]

VERSION = 1
DEFAULT_LEVEL = 1


class GeneralCodec(Codec):
    """A format that nvCOMP knows, and the host as well where it is plain."""

    lossless: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = tuple(dtype.name for dtype in DTYPES)

    family: ClassVar[int]
    """The first byte of the wire id."""

    form: ClassVar[Format]
    levels: ClassVar[range] = range(0)
    """What the parameter `level` may be: the encoder's effort, which the decoder never sees."""

    def __init__(self, level: int = DEFAULT_LEVEL) -> None:
        """Fix the level, for those that have one."""
        self.level = level

    @classmethod
    def from_parameters(cls, parameters: dict[str, str]) -> GeneralCodec:
        """Make the codec from the parameters of its spec string."""
        for key, value in parameters.items():
            if key != "level" or not _is_among(value, cls.levels):
                raise _wrong_parameter(cls.name, cls.levels, f"{key}={value}")
        return cls(int(parameters.get("level", DEFAULT_LEVEL)))

    @property
    def spec(self) -> str:
        """The name, with the level where it is not the default."""
        return self.name if self.level == DEFAULT_LEVEL else f"{self.name}:level={self.level}"

    @property
    def wire_id(self) -> int:
        """Family and version; the level changes no decoder."""
        return self.family << 24 | VERSION << 16

    def options(self, dtype: DType) -> dict[str, Any]:
        """Return nvCOMP's options for elements of this type."""
        return {}

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the encoding; a buffer too long for the format travels raw."""
        self.check_dtype(source.dtype)
        self.check_capacity(source, to)
        on_host = self._check_side(stream)
        if source.count == 0:
            return Pending(lambda: True, lambda: 0)
        if on_host:
            return cramjam.encode(self.name, self.level, source, to, stream)
        return nvcomp.session(self.form, self.options(source.dtype), stream).encode(source, to, stream)

    def decode(self, source: Memory, nbytes: int, to: Buffer, stream: Stream) -> Pending:
        """Queue the decoding, which must fill `to` exactly."""
        return self.decode_reduce(source, nbytes, to, "replace", stream)

    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        """Queue the decoding into temporary memory and the reduction from there."""
        self.check_dtype(to.dtype)
        self.check_operation(op, to.dtype)
        on_host = self._check_side(stream)
        broken = partial(self._broken, to.nbytes)
        if nbytes == to.count == 0:
            return Pending(lambda: True, lambda: 0)
        if not (to.count and 0 < nbytes <= min(source.nbytes, self.max_encoded(to.count, to.dtype))):
            return Pending(lambda: True, partial(_raise, broken(f"{nbytes} bytes")))
        finish = None if op == "replace" else partial(_reduce, to, op)
        if on_host:
            return cramjam.decode(self.name, source, nbytes, to, stream, broken, finish)
        session = nvcomp.session(self.form, self.options(to.dtype), stream)
        return session.decode(source, nbytes, to, stream, broken, finish)

    def tolerates_damage(self, stream: Stream) -> bool:
        """On the host; nvCOMP does not promise as much."""
        return stream.device.name == "host"

    def _broken(self, nbytes: int, got: str) -> StreamError:
        return StreamError(
            f"codec {self.spec}",
            expected=f"a {self.name} stream of {nbytes} plain bytes",
            got=got,
            remedy="The bytes were damaged or cut short on their way, or another codec wrote them.",
        )

    def _check_side(self, stream: Stream) -> bool:
        """Say whether the stream is the host's, and raise if the format is not for it."""
        on_host = stream.device.name == "host"
        if on_host and not self.form.plain:
            raise DeviceError(
                f"codec {self.spec}",
                expected="a stream of a GPU",
                got="one of the host",
                remedy=f"The codec {self.name} needs a GPU; lz4, snappy, zstd and deflate run on both machines.",
            )
        return on_host


def _reduce(to: Buffer, op: str, decoded: int, stream: Stream) -> None:
    """Queue to = to op decoded."""
    tiles = -(-to.count // REDUCE_TILE)
    stream.launch(f"reduce_{to.dtype.suffix}", tiles, to.address, decoded, to.count, OPS[op])


def _raise(error: StreamError) -> NoReturn:
    raise error


def _is_among(value: str, levels: range) -> bool:
    return value.isascii() and value.isdecimal() and int(value) in levels


def _wrong_parameter(name: str, levels: range, got: str) -> SpecError:
    expected = f"level={levels[0]}..{levels[-1]}" if levels else "no parameters"
    example = f", or for example {name}:level={levels[2]}" if levels else ""
    return SpecError(f"codec {name}", expected=expected, got=got, remedy=f"Write {name}{example}.")
