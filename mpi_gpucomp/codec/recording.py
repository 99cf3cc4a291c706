"""Records what a kernel codec launches, so that the core can replay it without Python.

A codec queues the same kernels for every chunk of one length and type; only addresses differ. So it is run once on a
stream that records them, with addresses that stand for the source, the target and scratch memory. On the host a launch
names a function of the host library, on a GPU a kernel that the driver knows.
"""

from __future__ import annotations

import struct
from array import array
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mpi_gpucomp.codec.auto import BLOCK_BYTES, BLOCKS, BY_WIRE_ID, CHUNKS_PER_SAMPLE, MARGIN, Auto
from mpi_gpucomp.codec.bound import Bound
from mpi_gpucomp.codec.cast import Cast
from mpi_gpucomp.codec.kernel_codec import FixedCodec, KernelCodec, KernelPending, TiledCodec
from mpi_gpucomp.codec.mpc import Mpc
from mpi_gpucomp.codec.raw import Raw
from mpi_gpucomp.codec.split import Split
from mpi_gpucomp.codec.zfp import Zfp
from mpi_gpucomp.device import library
from mpi_gpucomp.device.base import Device, Event, Memory, Stream
from mpi_gpucomp.device.buffer import Buffer
from mpi_gpucomp.device.pool import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.codec.base import Codec
    from mpi_gpucomp.device.base import DType

__all__ = [
    "KernelTable",
    "SamplingRule",
    "accepted_ids",
    "is_recordable",
    "record_decoding",
    "record_encoding",
    "recorded_codecs",
    "sampling_rule",
]

SHIFT = 57
SOURCE, TARGET, SCRATCH, NBYTES, RESULT, PINNED = (base << SHIFT for base in range(1, 7))
"""Addresses and lengths from here on stand for those of a chunk; see `Base` in core/src/coding.h.

Copies to pinned memory are not recorded: the core reports a size and a status in its own way.
"""
RESULT_BYTES = 16
WARPS_PER_BLOCK = 4  # as in kernels/simt_cuda.h
KERNEL, COPY, FILL = 0, 1, 2
RECORDED = (Raw, Split, Mpc, Zfp, Bound, Cast)
"""Codecs whose launches depend on count and type alone."""
STATUS_BITS = (1, 2)
ANY_LENGTH = (1 << 62) - 1


class _Passed(Event):
    """An event that every stream has passed."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class KernelTable(Protocol):
    """The handles of a GPU's kernels."""

    def kernel(self, name: str) -> int:
        """Return the handle of a kernel."""
        ...


class _RecordingDevice(Device):
    """The host or a GPU, with memory that is only counted."""

    def __init__(self, gpu: KernelTable | None = None) -> None:
        self.gpu = gpu
        self.name, self.appends_in_place = ("host", True) if gpu is None else ("cuda:0", False)
        self.scratch_bytes = 0

    def alloc(self, nbytes: int) -> Memory:
        start, self.scratch_bytes = self.scratch_bytes, self.scratch_bytes + -(-nbytes // ALIGNMENT) * ALIGNMENT
        return Memory(SCRATCH + start, nbytes, self, None)

    def pinned(self, nbytes: int) -> Memory:
        return self.alloc(nbytes) if self.gpu is None else Memory(PINNED, nbytes, self, None)

    def stream(self) -> Stream:
        return _Recorder(self)


class _RecordedLaunch(NamedTuple):
    """Recorded work: its kind, the kernel, the tiles, the grain (on a GPU the blocks), and the arguments."""

    kind: int
    function: int
    tiles: int
    grain: int
    args: tuple[int | float, ...]


class _Recorder(Stream):
    """A stream that records its launches."""

    device: _RecordingDevice

    def __init__(self, device: _RecordingDevice) -> None:
        self.device = device
        self.launches: list[_RecordedLaunch] = []

    def launch(self, kernel: str, tiles: int, *args: int | float, split: bool = True, grain: int = 64) -> None:
        gpu = self.device.gpu
        if gpu is None:
            work = _RecordedLaunch(KERNEL, library.kernel_address(kernel), tiles, grain if split else 0, args)
        else:
            blocks = -(-tiles // WARPS_PER_BLOCK) if split else 1
            work = _RecordedLaunch(KERNEL, gpu.kernel(kernel), tiles, blocks, args)
        self.launches.append(work)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        if to != PINNED:
            self.launches.append(_RecordedLaunch(COPY, 0, 0, 0, (to, source, nbytes)))

    def fill(self, to: int, byte: int, nbytes: int) -> None:
        self.launches.append(_RecordedLaunch(FILL, 0, 0, 0, (to, byte, nbytes)))

    def numbers(self, result: int) -> array[int]:
        """Return the launches as the core reads them; kernels write size and status at the offset `result`."""
        numbers, kept = array("q"), self.launches
        if self.device.gpu is not None:  # the core's memory for results is zero before each chunk
            kept = [one for one in kept if one.kind != FILL or one.args[0] != SCRATCH + result]
        numbers.append(len(kept))
        for one in kept:
            # The host passes integers and doubles in registers of two kinds, a GPU all arguments in their order.
            doubles = [x for x in one.args if isinstance(x, float)] if self.device.gpu is None else []
            numbers.extend((*one[:4], len(one.args) - len(doubles), len(doubles)))
            for value in one.args:
                if not isinstance(value, float):
                    numbers.extend(self._relative(value, result))
                elif self.device.gpu is not None:
                    numbers.extend((0, _bits(value)))
            numbers.extend(map(_bits, doubles))
        return numbers

    def _relative(self, value: int, result: int) -> tuple[int, int]:
        """Return what an argument is relative to, and the difference."""
        if self.device.gpu is not None and result >= 0 and 0 <= value - SCRATCH - result < RESULT_BYTES:
            return RESULT >> SHIFT, value - SCRATCH - result
        base = (value + (1 << SHIFT - 1)) >> SHIFT if value > 0 else 0  # an offset may be negative
        return base, value - (base << SHIFT)

    def run(self, work: Callable[[], None]) -> None:
        """Drop work in Python: recorded codecs only keep memory alive by it."""

    def release(self, memory: Memory) -> None:
        """Keep the memory: each allocation has its own place in scratch."""

    def record(self) -> Event:
        return _Passed()

    def wait(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass


def is_recordable(codec: Codec, *, on_gpu: bool = False) -> bool:
    """Return True if the core can run this codec; derived classes may do anything, and are called in Python.

    So is `auto` on a GPU, which chooses by samples that the host would have to wait for.
    """
    return type(codec) in RECORDED or (type(codec) is Auto and not on_gpu)


def _bits(x: float) -> int:
    """Return the bits of a double as an integer."""
    bits: int = struct.unpack("<q", struct.pack("<d", x))[0]
    return bits


def record_encoding(codec: Codec, count: int, dtype: DType, gpu: KernelTable | None = None) -> array[int] | None:
    """Return the recording of the encoding of `count` elements; None if such a chunk is always sent raw."""
    stream = _Recorder(_RecordingDevice(gpu))
    most = codec.max_encoded(count, dtype)
    source = Buffer(SOURCE, dtype, (count,), device=stream.device.name)
    to = Memory(TARGET, most, stream.device, None)
    pending = codec.encode(source, to, stream)
    if not isinstance(pending, KernelPending):
        size = pending.result()
        return None if size is None else _recording(stream, -1, size, 0, 0, (0, most))
    base, more = pending.interpret(0, 0), pending.interpret(8, 0)
    assert base is not None and more is not None
    unrepresentable = sum(bit for bit in STATUS_BITS if pending.interpret(0, bit) is None)
    return _recording(stream, pending.address - SCRATCH, base, (more - base) // 8, unrepresentable, (0, most))


def record_decoding(
    codec: KernelCodec, count: int, dtype: DType, op: str, gpu: KernelTable | None = None
) -> array[int]:
    """Return the recording of the decoding of `count` elements with an operation."""
    stream = _Recorder(_RecordingDevice(gpu))
    to = Buffer(TARGET, dtype, (count,), device=stream.device.name)
    if isinstance(codec, FixedCodec):
        nbytes, bounds = codec.encoded_size(count, dtype), (codec.encoded_size(count, dtype),) * 2
    else:
        assert isinstance(codec, TiledCodec)
        nbytes, bounds = NBYTES, (codec.tiling(dtype).tiles_start(count), ANY_LENGTH)
    pending = codec.decode_reduce(Memory(SOURCE, nbytes, stream.device, None), nbytes, to, op, stream)
    where = pending.address - SCRATCH if isinstance(pending, KernelPending) else -1
    return _recording(stream, where, 0, 0, 0, bounds)


def _recording(
    stream: _Recorder, result: int, base: int, slope: int, unrepresentable: int, bounds: tuple[int, int]
) -> array[int]:
    head = (stream.device.scratch_bytes, result, base, slope, unrepresentable, *bounds)
    return array("q", head) + stream.numbers(result)


def recorded_codecs(codec: Codec, dtype: DType) -> list[KernelCodec]:
    """Return the codecs that encode chunks for `codec`: itself, or the candidates of `auto` that can be recorded."""
    if not isinstance(codec, Auto):
        assert isinstance(codec, KernelCodec)
        return [codec]
    return [one for one in codec.candidates(dtype) if isinstance(one, KernelCodec) and type(one) in RECORDED]


class SamplingRule:
    """How `auto` chooses for chunks of one length: the candidates, the sample, and the costs."""

    def __init__(self, auto: Auto, count: int, dtype: DType) -> None:
        """Read the costs of a codec."""
        self.candidates = auto.worth_sampling(dtype, count * dtype.itemsize)
        block = BLOCK_BYTES // dtype.itemsize
        self.block, self.blocks = (block, BLOCKS) if count > BLOCKS * block else (0, 0)
        self.sample_count = self.blocks * self.block or count
        self.wire, self.raw, self.margin = auto.costs.wire, auto.costs.raw(dtype), MARGIN
        self.chunks_per_sample = CHUNKS_PER_SAMPLE
        self.speeds = [auto.costs.of(codec, dtype) or (0.0, 0.0) for codec in self.candidates]


def sampling_rule(codec: Codec, count: int, dtype: DType) -> SamplingRule | None:
    """Return how a codec chooses; None if it encodes all chunks itself, or chooses codecs that run in Python."""
    if not isinstance(codec, Auto):
        return None
    chosen = SamplingRule(codec, count, dtype)
    return chosen if all(type(one) in RECORDED for one in chosen.candidates) else None


def accepted_ids(codec: Codec) -> list[int]:
    """Return the wire ids that frames for this codec may have."""
    return [*BY_WIRE_ID, codec.wire_id] if isinstance(codec, Auto) else [codec.wire_id]
