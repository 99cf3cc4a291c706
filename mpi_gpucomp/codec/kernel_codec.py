"""Codecs implemented by this project's kernels: parameters, checks, and encodings of fixed size or in tiles.

`FixedCodec` is for formats whose encoded size depends only on the element count; one kernel does the work. `TiledCodec`
is for formats of variable size: a table of tile sizes, then the tiles (kernels/tiles.h).
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from mpi_gpucomp.codec.base import OPS, Codec, Pending
from mpi_gpucomp.errors import BufferSpecError, DecodeError, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from mpi_gpucomp.device.base import Device, DType, Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer

__all__ = [
    "BAD_STREAM",
    "NOT_FINITE",
    "DecodeJob",
    "EncodeJob",
    "FixedCodec",
    "KernelCodec",
    "KernelPending",
    "KernelResult",
    "Parameter",
    "Parameters",
    "TiledCodec",
    "Tiling",
    "float_parameter",
    "int_parameter",
]

BAD_STREAM, NOT_FINITE = 1, 2
"""Status bits that kernels set, as in kernels/status.h."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a codec spec: a parser, which returns None for invalid text, and a description."""

    parse: Callable[[str], Any]
    description: str


def float_parameter(
    low: float, high: float | None, description: str, *, exclude_low: bool = False, exclude_high: bool = False
) -> Parameter:
    """Return a parameter that is a finite number from `low` to `high`, with or without these limits themselves."""

    def parse(text: str) -> float | None:
        try:
            value = float(text)
        except ValueError:
            return None
        above = value > low if exclude_low else value >= low
        below = high is None or (value < high if exclude_high else value <= high)
        return value if isfinite(value) and above and below else None

    return Parameter(parse, description)


def int_parameter(low: int, high: int, description: str) -> Parameter:
    """Return a parameter that is an integer from `low` to `high`."""

    def parse(text: str) -> int | None:
        digits = text.isascii() and text.isdecimal()
        return int(text) if digits and low <= int(text) <= high else None

    return Parameter(parse, description)


class Parameters:
    """The parameters of a codec, by name."""

    def __init__(self, *, required: bool = False, **known: Parameter) -> None:
        """Define the parameters; with `required`, the codec's name alone is not a valid spec."""
        self._known, self._required = known, required

    def parse(self, codec: str, given: dict[str, str]) -> dict[str, Any]:
        """Return the values of the parameters in a spec string."""
        values = {}
        for name, text in given.items():
            parameter = self._known.get(name)
            value = parameter.parse(text) if parameter else None
            if value is None:
                raise SpecError(
                    f"codec {codec}",
                    expected=self.describe(),
                    got=f"{name}={text}" if text else f"'{name}'",
                    remedy=f"Write {', or '.join(self._examples(codec))}.",
                )
            values[name] = value
        return values

    def describe(self) -> str:
        """Return the names of the parameters with their descriptions."""
        return " or ".join(f"{name}= ({p.description})" for name, p in self._known.items()) or "no parameters"

    def _examples(self, codec: str) -> list[str]:
        return [codec] * (not self._required) + [f"{codec}:{known}=..." for known in self._known]


class KernelResult:
    """Two numbers that kernels write and the host reads back: a size and status bits."""

    NBYTES = 16

    def __init__(self, stream: Stream) -> None:
        """Allocate zeroed memory for the kernels, and pinned memory for the host unless both are the same."""
        device: Device = stream.device
        self._pinned = device.pinned(self.NBYTES)
        self._device_copy = self._pinned if device.name == "host" else device.alloc(self.NBYTES)
        self.size, self.status = self._device_copy.address, self._device_copy.address + 8
        stream.fill(self._device_copy.address, 0, self.NBYTES)

    def read_back(self, stream: Stream, interpret: Callable[[int, int], int | None]) -> KernelPending:
        """Queue the copy to the host; the result is `interpret(size, status)`."""
        pinned = self._pinned
        if self._device_copy is not pinned:
            stream.copy(pinned.address, self._device_copy.address, self.NBYTES)
            stream.release(self._device_copy)
        stream.run(partial(_keep_alive, pinned))  # for a Pending that is dropped before the kernels have run
        event = stream.record()

        def result() -> int | None:
            event.wait()
            size, status = (ctypes.c_uint64 * 2).from_address(pinned.address)
            pinned.release()
            return interpret(size, status)

        return KernelPending(event.done, result, self._device_copy.address, interpret)


class KernelPending(Pending):
    """A result that kernels write: a size and status bits at an address, and what they mean."""

    def __init__(
        self,
        done: Callable[[], bool],
        result: Callable[[], int | None],
        address: int,
        interpret: Callable[[int, int], int | None],
    ) -> None:
        """Describe the result: `interpret(size, status)`."""
        super().__init__(done, result)
        self.address, self.interpret = address, interpret


def _keep_alive(memory: Memory) -> None:
    """Do nothing: a stream keeps references to the arguments of queued work."""


class KernelCodec(Codec):
    """A codec implemented by kernels of this project, on any device."""

    parameters: ClassVar[Parameters] = Parameters()
    """Parameters of the spec string; each is a keyword argument of the class."""

    @classmethod
    def from_parameters(cls, parameters: dict[str, str]) -> Self:
        """Create the codec from the parameters of its spec string."""
        return cls(**cls.parameters.parse(cls.name, parameters))

    def check_encode(self, source: Buffer, to: Memory, stream: Stream) -> None:
        """Raise unless `source` can be encoded into `to` on this stream."""
        self.check_dtype(source.dtype)
        self._check_buffer(source, stream)
        self.check_capacity(source, to)

    def check_decode(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> None:
        """Raise unless `nbytes` of `source` can be decoded into `to` on this stream."""
        self.check_dtype(to.dtype)
        self._check_buffer(to, stream)
        self.check_operation(op, to.dtype)
        if to.readonly:
            raise BufferSpecError(
                f"codec {self.spec}",
                expected="a writable buffer",
                got="a read-only one",
                remedy="Pass a writable copy.",
            )
        if nbytes > source.nbytes:
            raise self.decode_error(to.count, f"{source.nbytes} of {nbytes} bytes")

    def _check_buffer(self, buffer: Buffer, stream: Stream) -> None:
        if buffer.device != stream.device.name:
            raise BufferSpecError(
                f"codec {self.spec}",
                expected=f"elements on {stream.device.name}, the stream's device",
                got=f"elements on {buffer.device}",
                remedy="Use a stream of the buffer's device.",
            )
        if not buffer.contiguous:
            raise BufferSpecError(
                f"codec {self.spec}",
                expected="contiguous elements",
                got=f"strides {buffer.strides} for shape {buffer.shape}",
                remedy="Pack strided elements first.",
            )

    def decode(self, source: Memory, nbytes: int, to: Buffer, stream: Stream) -> Pending:
        """Queue the decoding of `nbytes` of `source` into `to`."""
        return self.decode_reduce(source, nbytes, to, "replace", stream)

    def decode_error(self, count: int, got: str) -> DecodeError:
        """Return the error for bytes that do not encode `count` elements."""
        return DecodeError(
            f"codec {self.spec}",
            expected=f"an encoding of {count} elements",
            got=got,
            remedy="The bytes were damaged or truncated in transit, or written by another codec.",
        )

    def failed(self, count: int, got: str) -> Pending:
        """Return the completed decoding of bytes that do not encode `count` elements."""

        def result() -> None:
            raise self.decode_error(count, got)

        return Pending(_done, result)

    def decoded_size(self, count: int, nbytes: int, size: int, status: int) -> int:
        """Return the bytes that a decoder has consumed, or raise if its status has an error."""
        if status & BAD_STREAM:
            raise self.decode_error(count, "invalid bytes")
        return nbytes

    @staticmethod
    def recorded(stream: Stream, nbytes: int) -> Pending:
        """Return a Pending of `nbytes` for the work queued so far."""
        event = stream.record()

        def result() -> int:
            event.wait()
            return nbytes

        return Pending(event.done, result)

    @staticmethod
    def empty() -> Pending:
        """Return the completed encoding or decoding of no elements."""
        return Pending(_done, partial(int, 0))


def _done() -> bool:
    return True


class FixedCodec(KernelCodec):
    """A codec whose encoded size depends only on count and type; chunks that it cannot represent are sent raw."""

    tile: ClassVar[int]
    """Elements in a tile of its kernels."""

    @abstractmethod
    def encoded_size(self, count: int, dtype: DType) -> int:
        """Return the size of an encoding in bytes."""

    @abstractmethod
    def kernel(self, direction: str, dtype: DType) -> str:
        """Return the name of the kernel for `encode` or `decode`."""

    def kernel_settings(self, dtype: DType) -> tuple[int, ...]:
        """Return additional arguments of the kernels."""
        return ()

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return the size of an encoding in bytes."""
        return self.encoded_size(count, dtype)

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the encoding."""
        self.check_encode(source, to, stream)
        if not source.count:
            return self.empty()
        result, nbytes = KernelResult(stream), self.encoded_size(source.count, source.dtype)
        args = (source.address, source.count, to.address, *self.kernel_settings(source.dtype), result.status)
        stream.launch(self.kernel("encode", source.dtype), -(-source.count // self.tile), *args)
        return result.read_back(stream, lambda size, status: None if status & NOT_FINITE else nbytes)

    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        """Queue the decoding; all bytes of the right length are a valid encoding."""
        self.check_decode(source, nbytes, to, op, stream)
        if nbytes != self.encoded_size(to.count, to.dtype):
            return self.failed(to.count, f"{nbytes} bytes instead of {self.encoded_size(to.count, to.dtype)}")
        if not to.count:
            return self.empty()
        args = (source.address, to.count, to.address, *self.kernel_settings(to.dtype), OPS[op])
        stream.launch(self.kernel("decode", to.dtype), -(-to.count // self.tile), *args)
        return self.recorded(stream, nbytes)


@dataclass(frozen=True)
class Tiling:
    """The layout of a tiled encoding for elements of one type: header, tile sizes, padding to 8 bytes, tiles."""

    values: int
    """Elements in a tile."""
    slot: int
    """Maximum bytes of an encoded tile."""
    header: int = 0
    """Bytes of the header."""
    table: int = 0
    """Maximum bytes of the codec's table, which is sent as an additional first tile; 0: no table."""
    grain: int = 64
    """Tiles that justify another core."""

    def tiles(self, count: int) -> int:
        """Return the number of tiles for `count` elements."""
        return -(-count // self.values)

    def entries(self, count: int) -> int:
        """Return the number of tiles, including the table."""
        return self.tiles(count) + bool(self.table)

    def sizes_end(self, count: int) -> int:
        """Return the offset of the first byte behind the tile sizes."""
        return self.header + 4 * self.entries(count)

    def tiles_start(self, count: int) -> int:
        """Return the offset of the first tile, a multiple of 8."""
        return -(-self.sizes_end(count) // 8) * 8

    def max_tile_bytes(self, count: int) -> int:
        """Return the maximum bytes of all tiles."""
        return self.table + self.tiles(count) * self.slot


@dataclass(frozen=True)
class EncodeJob:
    """The buffer and the addresses that the kernels of an encoder work on."""

    source: Buffer
    tiles: int
    header: int
    sizes: int
    starts: int
    slots: int
    scratch: int


class DecodeJob(NamedTuple):
    """The addresses of what the kernel of a decoder reads, the length of all tiles, and the status that it writes."""

    header: int
    sizes: int
    tiles: int
    available: int
    status: int


class TiledCodec(KernelCodec):
    """A codec whose encoding is a sequence of tiles of variable size."""

    @abstractmethod
    def tiling(self, dtype: DType) -> Tiling:
        """Return the layout for elements of this type."""

    @abstractmethod
    def encode_tiles(self, job: EncodeJob, stream: Stream) -> None:
        """Queue the kernels that write the tiles (and the table) to their slots, with their sizes and starts."""

    @abstractmethod
    def decode_tiles(self, job: DecodeJob, to: Buffer, op: int, stream: Stream) -> None:
        """Queue the kernel that checks the sizes of the tiles, and decodes them into `to`."""

    def encode_scratch_bytes(self, count: int, dtype: DType) -> int:
        """Return the scratch memory that `encode_tiles` needs, in bytes."""
        return 0

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return an upper bound for the bytes of an encoding."""
        tiling = self.tiling(dtype)
        return tiling.tiles_start(count) + tiling.max_tile_bytes(count) if count else 0

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the encoding; tiles that were written to separate slots are joined at the end."""
        self.check_encode(source, to, stream)
        if not source.count:
            return self.empty()
        tiling, count, in_place = self.tiling(source.dtype), source.count, stream.device.appends_in_place
        entries, tiles_start, sizes_end = tiling.entries(count), tiling.tiles_start(count), tiling.sizes_end(count)
        # The scratch memory: the start of each entry, the codec's part, slots unless the tiles are in place.
        codec_part = 8 * entries
        slots = codec_part + -(-self.encode_scratch_bytes(count, source.dtype) // 256) * 256
        scratch = stream.device.alloc(slots + (0 if in_place else tiling.max_tile_bytes(count)))
        job = EncodeJob(
            source,
            tiling.tiles(count),
            header=to.address,
            sizes=to.address + tiling.header,
            starts=scratch.address,
            slots=to.address + tiles_start if in_place else scratch.address + slots,
            scratch=scratch.address + codec_part,
        )
        result = KernelResult(stream)
        self.encode_tiles(job, stream)
        padding = (tiles_start - sizes_end) // 4  # previous contents of the memory must not be sent
        joined = (job.slots, job.starts, job.sizes, entries, padding, to.address + tiles_start, result.size)
        stream.launch("tiles_join", entries, *joined, split=not in_place)
        stream.release(scratch)
        return result.read_back(stream, lambda size, status: tiles_start + size)

    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        """Queue the decoding; the kernel checks sizes before it uses them."""
        self.check_decode(source, nbytes, to, op, stream)
        tiling, count = self.tiling(to.dtype), to.count
        tiles_start = tiling.tiles_start(count) if count else 0
        if nbytes < tiles_start or (nbytes and not count):
            return self.failed(count, f"{nbytes} bytes")
        if not count:
            return self.empty()
        result = KernelResult(stream)
        header, tiles = source.address, source.address + tiles_start
        job = DecodeJob(header, header + tiling.header, tiles, nbytes - tiles_start, result.status)
        self.decode_tiles(job, to, OPS[op], stream)
        return result.read_back(stream, partial(self.decoded_size, count, nbytes))
