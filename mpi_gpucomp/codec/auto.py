"""For each chunk the lossless codec that gets it there soonest, or none; the sender alone decides.

A chunk goes through three stages, which work at the same time on different chunks: it is encoded, travels, and is
decoded. So what it costs is its slowest stage, max(encode, wire / ratio, decode), in seconds per plain byte. The speeds
are known in advance (`Costs`); the ratio is that of a few kilobytes from the chunk's start, middle and end. Raw is
chosen unless a codec is expected to be clearly faster, and no sample is taken where the link is too fast for
any ratio to pay, or the chunk too short for the sample to. Chunks that follow each other in memory share a sample.

The frame of a chunk names the codec that was chosen, so ranks may have different costs. What this codec itself encodes,
where there is no frame to say it, begins with eight bytes: the wire id of the codec that wrote the rest, and zeros.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from mpi_gpucomp.codec.base import Pending
from mpi_gpucomp.codec.general import Lz4, Zstd
from mpi_gpucomp.codec.kernel_codec import KernelCodec
from mpi_gpucomp.codec.mpc import Mpc
from mpi_gpucomp.codec.raw import Raw
from mpi_gpucomp.codec.split import Split
from mpi_gpucomp.device.base import DTYPES
from mpi_gpucomp.device.buffer import Buffer
from mpi_gpucomp.device.host import HostDevice, InlineStream
from mpi_gpucomp.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from mpi_gpucomp.codec.base import Codec
    from mpi_gpucomp.device.base import DType, Event, Memory, Stream

__all__ = ["ASSUMED", "CODINGS", "Auto", "CodecSample", "CodecSpeed", "Costs"]

NONE, SPLIT, MPC, LZ4, ZSTD = Raw(), Split(), Mpc(), Lz4(), Zstd()
BY_WIRE_ID: dict[int, Codec] = {codec.wire_id: codec for codec in (NONE, SPLIT, MPC, LZ4, ZSTD)}
CANDIDATES: dict[str, tuple[Codec, ...]] = {
    "float16": (SPLIT,),
    "bfloat16": (SPLIT,),
    "float32": (SPLIT, MPC),
    "float64": (SPLIT, MPC),
}
GENERAL: tuple[Codec, ...] = (LZ4, ZSTD)
"""The candidates for elements of all other types."""

ANY_TYPE = "uint8"
CODINGS: tuple[tuple[Codec, str], ...] = (
    (NONE, ANY_TYPE),
    *((codec, name) for name, codecs in CANDIDATES.items() for codec in codecs),
    *((codec, ANY_TYPE) for codec in GENERAL),
)
"""The codecs whose speed matters, and for which elements: those that see bytes alone have one speed for all types."""

MARGIN = 1.05
"""How many times faster than raw a codec must promise to be."""
PIECE_BYTES, PIECES = 4096, 3
CHUNKS_PER_SAMPLE = 8
SAMPLE_SHARE = 0.03 * CHUNKS_PER_SAMPLE
"""What samples may take of the time that the raw chunk would; most chunks take part in a sample that is there."""
MOST_REMEMBERED = 64
PREFIX = struct.Struct("<II")


class CodecSpeed(NamedTuple):
    """The seconds per plain byte that a codec takes to make a frame, and to check and decode it."""

    encode: float
    decode: float


_TYPICAL = {
    ("none", ANY_TYPE): CodecSpeed(0.2e-9, 0.3e-9),
    ("split", "float16"): CodecSpeed(1.3e-9, 1e-9),
    ("split", "bfloat16"): CodecSpeed(0.75e-9, 0.75e-9),
    ("split", "float32"): CodecSpeed(0.45e-9, 0.45e-9),
    ("split", "float64"): CodecSpeed(0.5e-9, 0.45e-9),
    ("mpc", "float32"): CodecSpeed(0.4e-9, 0.5e-9),
    ("mpc", "float64"): CodecSpeed(0.4e-9, 0.5e-9),
    ("lz4", ANY_TYPE): CodecSpeed(4e-9, 1e-9),
    ("zstd", ANY_TYPE): CodecSpeed(8e-9, 3e-9),
}


@dataclass(frozen=True)
class Costs:
    """What the wire and the codecs cost; unless measured, a network of 10 Gbit/s and one core of a processor."""

    wire: float = 0.8e-9
    """Seconds per byte on the link."""
    coding: Mapping[tuple[str, str], CodecSpeed] = field(default_factory=lambda: dict(_TYPICAL))
    """By names of codec and element type, as in CODINGS; a codec that is not there is not used."""
    sample: float = 50e-6
    """Seconds that it takes to try one codec on a sample."""

    def of(self, codec: Codec, dtype: DType) -> CodecSpeed | None:
        """Return the speeds of a codec on elements of a type, or None if it is not to be used."""
        return self.coding.get((codec.name, dtype.name)) or self.coding.get((codec.name, ANY_TYPE))

    def raw(self, dtype: DType) -> float:
        """Return the seconds per byte of a chunk that travels as it is."""
        return max(self.wire, *(self.of(NONE, dtype) or (0.0,)))


ASSUMED = Costs()
"""The costs of `find("auto")`, which knows no link."""


class CodecSample(NamedTuple):
    """What a sample has shown: the codec to use, and how many times smaller it makes the elements."""

    codec: Codec
    ratio: float


class Auto(KernelCodec):
    """A codec that encodes by another, chosen for each chunk."""

    name: ClassVar[str] = "auto"
    lossless: ClassVar[bool] = True
    shared: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = tuple(dtype.name for dtype in DTYPES)

    def __init__(self, costs: Costs = ASSUMED) -> None:
        """Decide by these costs; they change no decoder."""
        self.costs = costs
        self._missing: set[tuple[str, str]] = set()
        self._next: dict[tuple[int, str], tuple[int, Codec]] = {}

    @property
    def spec(self) -> str:
        """The name."""
        return "auto"

    @property
    def wire_id(self) -> int:
        """Family and version, of bytes that begin with the wire id of another codec."""
        return 0x06 << 24 | 1 << 16

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return what suffices for every codec that any rank might choose, whatever its costs."""
        most = max(codec.max_encoded(count, dtype) for codec in (NONE, *_candidates(dtype)))
        return PREFIX.size + most if count else 0

    def choose(self, source: Buffer, stream: Stream) -> Generator[Callable[[], bool], None, Codec]:
        """Choose by a sample, or as for the chunk before this one in memory."""
        codec = self._remembered(source)
        if codec is None:
            sampling = self.sample(source, stream)
            if not sampling.done():
                yield sampling.done
            codec = sampling.result().codec
            self._remember(source, CHUNKS_PER_SAMPLE - 1, codec)
        return codec

    def sample(self, source: Buffer, stream: Stream) -> Sampling:
        """Queue the encoding of a sample by every codec that might pay for elements like these."""
        return Sampling(self, self._worth_trying(source.dtype, source.nbytes), source, stream)

    def decoder(self, wire_id: int) -> Codec:
        """Return the codec that was chosen."""
        return BY_WIRE_ID.get(wire_id, self)

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the encoding by the codec of choice, with its wire id in front; waits for the sample."""
        self.check_encode(source, to, stream)
        if not source.count:
            return self.empty()
        codec = self.sample(source, stream).result().codec
        pending = codec.encode(source, to.part(PREFIX.size, to.nbytes - PREFIX.size), stream)
        _write(PREFIX.pack(codec.wire_id, 0), to, stream)

        def answer() -> int | None:
            size = pending.result()
            return None if size is None else PREFIX.size + size

        return Pending(pending.done, answer)

    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        """Queue the decoding by the codec that the bytes name; waits for them."""
        self.check_decode(source, nbytes, to, op, stream)
        if nbytes == to.count == 0:
            return self.empty()
        if nbytes < PREFIX.size:
            return self.refuse(to.count, f"{nbytes} bytes")
        wire_id, zeros = PREFIX.unpack(_read(source, PREFIX.size, stream))
        codec = BY_WIRE_ID.get(wire_id)
        if codec not in (NONE, *_candidates(to.dtype)) or zeros:
            return self.refuse(to.count, f"bytes of wire id {wire_id:#x}")
        rest = nbytes - PREFIX.size
        pending = codec.decode_reduce(source.part(PREFIX.size, rest), rest, to, op, stream)
        return Pending(pending.done, lambda: nbytes if pending.result() is not None else None)

    def tolerates_damage(self, stream: Stream) -> bool:
        """Only if every codec does that the bytes might name."""
        return all(codec.tolerates_damage(stream) for codec in BY_WIRE_ID.values())

    def best(self, dtype: DType, ratios: Mapping[Codec, float]) -> CodecSample:
        """Return the codec whose slowest stage is the quickest, if it is clearly quicker than no codec."""
        costs = self.costs
        times = {codec: max(costs.wire / ratio, *(costs.of(codec, dtype) or ())) for codec, ratio in ratios.items()}
        codec = min(times, key=times.__getitem__, default=None)
        if codec is None or times[codec] * MARGIN > costs.raw(dtype):
            return CodecSample(NONE, 1.0)
        return CodecSample(codec, ratios[codec])

    def available(self, codec: Codec, stream: Stream) -> bool:
        """Say whether a codec has not yet been found to lack a package for this device."""
        return (codec.name, stream.device.name) not in self._missing

    def miss(self, codec: Codec, stream: Stream) -> None:
        """Note that a codec lacks a package for this device."""
        self._missing.add((codec.name, stream.device.name))

    def _worth_trying(self, dtype: DType, nbytes: int) -> list[Codec]:
        """Return codecs that are fast enough to pay if only the ratio were good: as many as can be tried in time."""
        costs, raw = self.costs, self.costs.raw(dtype)
        known = ((codec, costs.of(codec, dtype)) for codec in _candidates(dtype))
        fast = [codec for codec, coding in known if coding and max(coding) * MARGIN <= raw]
        in_time = len(fast) if not costs.sample else int(SAMPLE_SHARE * raw * nbytes / costs.sample)
        return fast[:in_time]

    def _remembered(self, source: Buffer) -> Codec | None:
        """Return the codec of the chunk that ends where this one starts, if a sample is still good for it."""
        left, codec = self._next.pop((source.address, source.dtype.name), (0, None))
        if codec is not None:
            self._remember(source, left - 1, codec)
        return codec

    def _remember(self, source: Buffer, left: int, codec: Codec) -> None:
        """Note what the next chunk in memory is encoded by, if it comes."""
        if len(self._next) >= MOST_REMEMBERED:
            self._next.clear()  # chunks that never came
        if left:
            self._next[source.address + source.nbytes, source.dtype.name] = left, codec


class Sampling:
    """A sample on its way through the codecs that might pay."""

    def __init__(self, auto: Auto, codecs: list[Codec], source: Buffer, stream: Stream) -> None:
        """Queue the copying of the pieces, and their encoding by every codec."""
        self._auto, self._dtype, self._nbytes = auto, source.dtype, 0
        self._tried: dict[Codec, Pending] = {}
        self._event: Event | None = None
        codecs = [codec for codec in codecs if auto.available(codec, stream)]
        if not codecs or not source.count:
            return
        if isinstance(stream.device, HostDevice):  # one call in the stream's thread is quicker than many on its queue
            stream.run(partial(self._try, codecs, source, InlineStream(stream.device)))
            self._event = stream.record()
        else:
            self._try(codecs, source, stream)

    def _try(self, codecs: list[Codec], source: Buffer, stream: Stream) -> None:
        piece = PIECE_BYTES // source.dtype.itemsize
        plain = None if source.count <= PIECES * piece else stream.device.alloc(PIECES * PIECE_BYTES)
        sample = _pieces(source, piece, plain, stream) if plain else source
        self._nbytes = sample.nbytes
        room = stream.device.alloc(max(codec.max_encoded(sample.count, sample.dtype) for codec in codecs))
        for codec in codecs:
            try:
                self._tried[codec] = codec.encode(sample, room, stream)
            except DeviceError:
                self._auto.miss(codec, stream)
        for memory in (room, plain):
            if memory:
                stream.release(memory)

    def done(self) -> bool:
        """Say whether the result is there; never waits."""
        if self._event is not None:
            return self._event.done()
        return all(pending.done() for pending in self._tried.values())

    def result(self) -> CodecSample:
        """Wait, then return the codec to use."""
        if self._event is not None:
            self._event.wait()
        sizes = {codec: pending.result() for codec, pending in self._tried.items()}
        ratios = {codec: self._nbytes / size for codec, size in sizes.items() if size}
        return self._auto.best(self._dtype, ratios)


def _pieces(source: Buffer, piece: int, to: Memory, stream: Stream) -> Buffer:
    """Queue the copying of the start, the middle and the end of a buffer into one."""
    for at in range(PIECES):
        part = source.slice((source.count - piece) * at // (PIECES - 1), piece)
        stream.copy(to.address + at * part.nbytes, part.address, part.nbytes)
    return Buffer(to.address, source.dtype, (PIECES * piece,), device=source.device, owner=to)


def _candidates(dtype: DType) -> tuple[Codec, ...]:
    return CANDIDATES.get(dtype.name, GENERAL)


def _write(data: bytes, to: Memory, stream: Stream) -> None:
    """Queue the writing of a few bytes."""
    here = stream.device.pinned(len(data))
    ctypes.memmove(here.address, data, len(data))
    stream.copy(to.address, here.address, len(data))
    stream.release(here)


def _read(source: Memory, nbytes: int, stream: Stream) -> bytes:
    """Wait for what is queued, and return the first bytes."""
    with stream.device.pinned(nbytes) as here:
        stream.copy(here.address, source.address, nbytes)
        stream.synchronize()
        return ctypes.string_at(here.address, nbytes)
