"""The codec `auto`: the fastest lossless codec for each chunk, or none, chosen by the sender.

A chunk passes through a pipeline of three stages: encoding, transfer, decoding. Its cost is that of the slowest stage,
max(encode, wire / ratio, decode), in seconds per decoded byte. The speeds come from `Costs`, which GPUs may have of
their own; the ratio is measured on a sample of a few kilobytes from the start, middle and end of the chunk. Raw is
chosen unless a codec is expected to be clearly faster, and always where the wire is faster than the codec. No sample is
taken if the link is too fast for any ratio, or the chunk too short for a sample to pay. Chunks that are adjacent in
memory share a sample.

The frame of a chunk has the wire id of the chosen codec, so ranks may have different costs. Outside frames, the bytes
that this codec encodes start with a prefix of eight bytes: the wire id of the chosen codec, and zeros.
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
    from mpi_gpucomp.device.base import Device, DType, Event, Memory, Stream

__all__ = ["ASSUMED", "CODINGS", "Auto", "CodecSample", "CodecSpeed", "Costs"]

RAW, SPLIT, MPC, LZ4, ZSTD = Raw(), Split(), Mpc(), Lz4(), Zstd()
BY_WIRE_ID: dict[int, Codec] = {codec.wire_id: codec for codec in (RAW, SPLIT, MPC, LZ4, ZSTD)}
CANDIDATES: dict[str, tuple[Codec, ...]] = {
    "float16": (SPLIT,),
    "bfloat16": (SPLIT,),
    "float32": (SPLIT, MPC),
    "float64": (SPLIT, MPC),
}
GENERAL: tuple[Codec, ...] = (LZ4, ZSTD)
"""The candidates for all other element types."""

ANY_TYPE = "uint8"
CODINGS: tuple[tuple[Codec, str], ...] = (
    (RAW, ANY_TYPE),
    *((codec, name) for name, codecs in CANDIDATES.items() for codec in codecs),
    *((codec, ANY_TYPE) for codec in GENERAL),
)
"""The pairs of codec and element type whose speed is measured; codecs of bytes have one speed for all types."""

MARGIN = 1.05
"""How many times faster than raw a codec is expected to be before it is chosen."""
BLOCK_BYTES, BLOCKS = 4096, 3
"""A sample is three blocks."""
CHUNKS_PER_SAMPLE = 8
SAMPLE_SHARE = 0.03 * CHUNKS_PER_SAMPLE
"""Time for a sample, as a fraction of the time of one raw chunk; a sample serves CHUNKS_PER_SAMPLE chunks."""
MAX_REMEMBERED = 64
PREFIX = struct.Struct("<II")


class CodecSpeed(NamedTuple):
    """Seconds per decoded byte to encode a frame, and to verify and decode it."""

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
    """The costs of the wire and the codecs; the defaults are a 10 Gbit/s network and one core."""

    wire: float = 0.8e-9
    """Seconds per byte on the link."""
    coding: Mapping[tuple[str, str], CodecSpeed] = field(default_factory=lambda: dict(_TYPICAL))
    """Speeds by names of codec and element type, as in CODINGS; codecs without an entry are not used."""
    sample: float = 50e-6
    """Seconds to encode a sample with one codec."""

    def of(self, codec: Codec, dtype: DType) -> CodecSpeed | None:
        """Return the speed of a codec on elements of a type, or None if it is not used."""
        return self.coding.get((codec.name, dtype.name)) or self.coding.get((codec.name, ANY_TYPE))

    def keeps_up(self, codec: Codec, dtype: DType) -> bool:
        """Return True if a codec encodes and decodes clearly faster than the wire carries the elements."""
        speed = self.of(codec, dtype)
        return speed is not None and max(speed) * MARGIN <= self.wire

    def raw(self, dtype: DType) -> float:
        """Return the seconds per byte of a raw chunk."""
        return max(self.wire, *(self.of(RAW, dtype) or (0.0,)))


ASSUMED = Costs()
"""The costs of `get_codec("auto")`, which has not measured the link."""


class CodecSample(NamedTuple):
    """The result of a sample: the codec to use, and its compression ratio."""

    codec: Codec
    ratio: float


class Auto(KernelCodec):
    """A codec that encodes each chunk with another one."""

    name: ClassVar[str] = "auto"
    lossless: ClassVar[bool] = True
    shared: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = tuple(dtype.name for dtype in DTYPES)

    def __init__(self, costs: Costs = ASSUMED, gpu_costs: Costs | None = None) -> None:
        """Choose by these costs, of the host and of GPUs (None: the same); decoders do not depend on them."""
        self.costs, self.gpu_costs = costs, gpu_costs
        self._missing: set[tuple[str, str]] = set()
        self._next: dict[tuple[int, str], tuple[int, Codec]] = {}

    @property
    def spec(self) -> str:
        """The name."""
        return "auto"

    @property
    def wire_id(self) -> int:
        """Family and version of the prefixed bytes."""
        return 0x06 << 24 | 1 << 16

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return a bound for every codec that a rank may choose, whatever its costs."""
        bound = max(codec.max_encoded(count, dtype) for codec in (RAW, *_candidates(dtype)))
        return PREFIX.size + bound if count else 0

    def choose(self, source: Buffer, stream: Stream) -> Generator[Callable[[], bool], None, Codec]:
        """Choose by a sample, or reuse the codec of the preceding chunk in memory."""
        codec = self._remembered(source)
        if codec is None:
            sampling = self.sample(source, stream)
            if not sampling.done():
                yield sampling.done
            codec = sampling.result().codec
            self._remember(source, CHUNKS_PER_SAMPLE - 1, codec)
        return codec

    def sample(self, source: Buffer, stream: Stream) -> Sampling:
        """Queue the encoding of a sample with every codec that may be faster than raw."""
        costs = self.costs_on(stream.device)
        return Sampling(self, self.worth_sampling(source.dtype, source.nbytes, costs), source, stream)

    def costs_on(self, device: Device) -> Costs:
        """Return the costs of chunks that are on a device."""
        return self.costs if self.gpu_costs is None or isinstance(device, HostDevice) else self.gpu_costs

    def decoder(self, wire_id: int) -> Codec:
        """Return the codec with this wire id."""
        return BY_WIRE_ID.get(wire_id, self)

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the encoding with the chosen codec behind the prefix; blocks until the sample has completed."""
        self.check_encode(source, to, stream)
        if not source.count:
            return self.empty()
        codec = self.sample(source, stream).result().codec
        pending = codec.encode(source, to.part(PREFIX.size, to.nbytes - PREFIX.size), stream)
        _write_prefix(PREFIX.pack(codec.wire_id, 0), to, stream)

        def result() -> int | None:
            size = pending.result()
            return None if size is None else PREFIX.size + size

        return Pending(pending.done, result)

    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        """Queue the decoding with the codec of the prefix; blocks until that has been read."""
        self.check_decode(source, nbytes, to, op, stream)
        if nbytes == to.count == 0:
            return self.empty()
        if nbytes < PREFIX.size:
            return self.failed(to.count, f"{nbytes} bytes")
        wire_id, zeros = PREFIX.unpack(_read_prefix(source, stream))
        codec = BY_WIRE_ID.get(wire_id)
        if codec not in (RAW, *_candidates(to.dtype)) or zeros:
            return self.failed(to.count, f"bytes of wire id {wire_id:#x}")
        rest = nbytes - PREFIX.size
        pending = codec.decode_reduce(source.part(PREFIX.size, rest), rest, to, op, stream)
        return Pending(pending.done, lambda: nbytes if pending.result() is not None else None)

    def tolerates_damage(self, stream: Stream) -> bool:
        """Return True if every codec that the prefix can name does."""
        return all(codec.tolerates_damage(stream) for codec in BY_WIRE_ID.values())

    def best(self, dtype: DType, ratios: Mapping[Codec, float], costs: Costs | None = None) -> CodecSample:
        """Return the codec whose slowest stage is fastest, or raw unless the codec is clearly faster."""
        costs = costs or self.costs
        ratios = {codec: ratio for codec, ratio in ratios.items() if costs.keeps_up(codec, dtype)}
        times = {codec: max(costs.wire / ratio, *(costs.of(codec, dtype) or ())) for codec, ratio in ratios.items()}
        codec = min(times, key=times.__getitem__, default=None)
        if codec is None or times[codec] * MARGIN > costs.raw(dtype):
            return CodecSample(RAW, 1.0)
        return CodecSample(codec, ratios[codec])

    @staticmethod
    def candidates(dtype: DType) -> tuple[Codec, ...]:
        """Return the codecs that elements of a type may be encoded with, besides none."""
        return _candidates(dtype)

    def available(self, codec: Codec, stream: Stream) -> bool:
        """Return False if a package that the codec needs on this device was found missing."""
        return (codec.name, stream.device.name) not in self._missing

    def mark_unavailable(self, codec: Codec, stream: Stream) -> None:
        """Record that a package that the codec needs on this device is missing."""
        self._missing.add((codec.name, stream.device.name))

    def worth_sampling(self, dtype: DType, nbytes: int, costs: Costs | None = None) -> list[Codec]:
        """Return the codecs that are fast enough to pay at a good ratio, as many as the time for samples allows."""
        costs = costs or self.costs
        raw = costs.raw(dtype)
        fast = [codec for codec in _candidates(dtype) if costs.keeps_up(codec, dtype)]
        affordable = len(fast) if not costs.sample else int(SAMPLE_SHARE * raw * nbytes / costs.sample)
        return fast[:affordable]

    def _remembered(self, source: Buffer) -> Codec | None:
        """Return the codec of the chunk that ends where this one starts, if its sample is still valid."""
        left, codec = self._next.pop((source.address, source.dtype.name), (0, None))
        if codec is not None:
            self._remember(source, left - 1, codec)
        return codec

    def _remember(self, source: Buffer, left: int, codec: Codec) -> None:
        """Record the codec for the next chunk in memory."""
        if len(self._next) >= MAX_REMEMBERED:
            self._next.clear()  # of chunks that were never encoded
        if left:
            self._next[source.address + source.nbytes, source.dtype.name] = left, codec


class Sampling:
    """A sample that is being encoded with the candidate codecs."""

    def __init__(self, auto: Auto, codecs: list[Codec], source: Buffer, stream: Stream) -> None:
        """Queue the copy of the sample, and its encoding with every codec."""
        self._auto, self._dtype, self._nbytes = auto, source.dtype, 0
        self._costs = auto.costs_on(stream.device)
        self._pending: dict[Codec, Pending] = {}
        self._event: Event | None = None
        codecs = [codec for codec in codecs if auto.available(codec, stream)]
        if not codecs or not source.count:
            return
        if isinstance(stream.device, HostDevice):  # one item of work is faster than many
            stream.run(partial(self._encode, codecs, source, InlineStream(stream.device)))
            self._event = stream.record()
        else:
            self._encode(codecs, source, stream)

    def _encode(self, codecs: list[Codec], source: Buffer, stream: Stream) -> None:
        block = BLOCK_BYTES // source.dtype.itemsize
        copied = None if source.count <= BLOCKS * block else stream.device.alloc(BLOCKS * BLOCK_BYTES)
        sample = _copy_blocks(source, block, copied, stream) if copied else source
        self._nbytes = sample.nbytes
        encoded = stream.device.alloc(max(codec.max_encoded(sample.count, sample.dtype) for codec in codecs))
        for codec in codecs:
            try:
                self._pending[codec] = codec.encode(sample, encoded, stream)
            except DeviceError:
                self._auto.mark_unavailable(codec, stream)
        for memory in (encoded, copied):
            if memory:
                stream.release(memory)

    def done(self) -> bool:
        """Return True if the result is available; never blocks."""
        if self._event is not None:
            return self._event.done()
        return all(pending.done() for pending in self._pending.values())

    def result(self) -> CodecSample:
        """Block until completion and return the codec to use."""
        if self._event is not None:
            self._event.wait()
        sizes = {codec: pending.result() for codec, pending in self._pending.items()}
        ratios = {codec: self._nbytes / size for codec, size in sizes.items() if size}
        return self._auto.best(self._dtype, ratios, self._costs)


def _copy_blocks(source: Buffer, block: int, to: Memory, stream: Stream) -> Buffer:
    """Queue the copy of blocks from the start, the middle and the end of a buffer."""
    for index in range(BLOCKS):
        part = source.slice((source.count - block) * index // (BLOCKS - 1), block)
        stream.copy(to.address + index * part.nbytes, part.address, part.nbytes)
    return Buffer(to.address, source.dtype, (BLOCKS * block,), device=source.device, owner=to)


def _candidates(dtype: DType) -> tuple[Codec, ...]:
    return CANDIDATES.get(dtype.name, GENERAL)


def _write_prefix(prefix: bytes, to: Memory, stream: Stream) -> None:
    pinned = stream.device.pinned(len(prefix))
    ctypes.memmove(pinned.address, prefix, len(prefix))
    stream.copy(to.address, pinned.address, len(prefix))
    stream.release(pinned)


def _read_prefix(source: Memory, stream: Stream) -> bytes:
    with stream.device.pinned(PREFIX.size) as pinned:
        stream.copy(pinned.address, source.address, PREFIX.size)
        stream.synchronize()
        return ctypes.string_at(pinned.address, PREFIX.size)
