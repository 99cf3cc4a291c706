"""What codecs made of kernels share: checks before the work is queued, and the answer that kernels leave behind."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar

from mpi_gpucomp.codec.base import OPS, Codec, Pending
from mpi_gpucomp.errors import BufferSpecError, DecodeError, DeviceError, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from mpi_gpucomp.device.base import Device, DType, Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer

__all__ = [
    "BAD_STREAM",
    "NOT_FINITE",
    "EncodeJob",
    "FixedCodec",
    "KernelCodec",
    "Mailbox",
    "Parameter",
    "Parameters",
    "TiledCodec",
    "Tiling",
    "needed",
    "number",
    "whole",
]


# Reads the parameters of codec specs, and says what is wrong with them and what would be right.


@dataclass(frozen=True)
class Parameter:
    """One parameter: how its text becomes a value (None: it does not), and what it should be in words."""

    read: Callable[[str], Any]
    meaning: str


def number(least: float, most: float | None, meaning: str, *, above: bool = False, below: bool = False) -> Parameter:
    """Make a parameter that is a finite number from `least` to `most`, or truly above and below them."""

    def read(text: str) -> float | None:
        try:
            value = float(text)
        except ValueError:
            return None
        low = value > least if above else value >= least
        high = most is None or (value < most if below else value <= most)
        return value if isfinite(value) and low and high else None

    return Parameter(read, meaning)


def whole(least: int, most: int, meaning: str) -> Parameter:
    """Make a parameter that is a whole number from `least` to `most`."""

    def read(text: str) -> int | None:
        plain = text.isascii() and text.isdecimal()
        return int(text) if plain and least <= int(text) <= most else None

    return Parameter(read, meaning)


class Parameters:
    """The parameters that a codec has, by name."""

    def __init__(self, *, needed: bool = False, **known: Parameter) -> None:
        """Name them; where one is `needed`, the codec's name alone is no spec."""
        self._known, self._needed = known, needed

    def read(self, codec: str, given: dict[str, str]) -> dict[str, Any]:
        """Turn the texts that were given into values."""
        values = {}
        for name, text in given.items():
            parameter = self._known.get(name)
            value = parameter.read(text) if parameter else None
            if value is None:
                raise SpecError(
                    f"codec {codec}",
                    expected=self.describe(),
                    got=f"{name}={text}" if text else f"'{name}'",
                    remedy=f"Write {', or '.join(self._forms(codec))}.",
                )
            values[name] = value
        return values

    def _forms(self, codec: str) -> list[str]:
        return [codec] * (not self._needed) + [f"{codec}:{known}=..." for known in self._known]

    def describe(self) -> str:
        """Say what can be given."""
        return " or ".join(f"{name}= ({p.meaning})" for name, p in self._known.items()) or "no parameters"


BAD_STREAM, NOT_FINITE = 1, 2
"""What a kernel can say went wrong, as in kernels/status.h."""


class Mailbox:
    """Two numbers that kernels leave for the processor: a size and what went wrong."""

    NBYTES = 16

    def __init__(self, stream: Stream) -> None:
        """Take empty room near the kernels: the processor's own where they run on it."""
        device: Device = stream.device
        self._here = device.pinned(self.NBYTES)
        ctypes.memset(self._here.address, 0, self.NBYTES)
        self._there = self._here if device.name == "host" else device.alloc(self.NBYTES)
        self.size, self.status = self._there.address, self._there.address + 8
        if self._there is not self._here:
            stream.copy(self._there.address, self._here.address, self.NBYTES)

    def send(self, stream: Stream, read: Callable[[int, int], int | None]) -> Pending:
        """Queue the way back; the answer is what `read` makes of size and status."""
        here = self._here
        if self._there is not here:
            stream.copy(here.address, self._there.address, self.NBYTES)
            stream.release(self._there)
        stream.run(partial(_outlast, here))  # also if nobody keeps the answer
        event = stream.record()

        def answer() -> int | None:
            event.wait()
            size, status = (ctypes.c_uint64 * 2).from_address(here.address)
            here.release()
            return read(size, status)

        return Pending(event.done, answer)


class KernelCodec(Codec):
    """A codec whose work is done by kernels of this project, on any device."""

    parameters: ClassVar[Parameters] = Parameters()
    """What its spec string can say; each is an argument of the class."""

    @classmethod
    def from_parameters(cls, parameters: dict[str, str]) -> Self:
        """Make the codec from the parameters of its spec string."""
        return cls(**cls.parameters.read(cls.name, parameters))

    def check_encode(self, source: Buffer, to: Memory, stream: Stream) -> None:
        """Raise unless `source` can be encoded into `to` on this stream."""
        self.check_dtype(source.dtype)
        self._check_place(source, stream)
        self.check_capacity(source, to)

    def check_decode(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> None:
        """Raise unless `nbytes` of `source` can be decoded onto `to` on this stream."""
        self.check_dtype(to.dtype)
        self._check_place(to, stream)
        self.check_operation(op, to.dtype)
        if to.readonly:
            raise BufferSpecError(
                f"codec {self.spec}",
                expected="a buffer that may be written",
                got="a read-only one",
                remedy="Pass a copy that may be written.",
            )
        if nbytes > source.nbytes:
            raise self.broken(to.count, f"{source.nbytes} of {nbytes} bytes")

    def _check_place(self, buffer: Buffer, stream: Stream) -> None:
        if buffer.device != stream.device.name or not buffer.contiguous:
            layout = "contiguous" if buffer.contiguous else "strided"
            raise BufferSpecError(
                f"codec {self.spec}",
                expected=f"contiguous elements on {stream.device.name}, where the stream is",
                got=f"{layout} ones on {buffer.device}",
                remedy="Use a stream of the buffer's device, and pack strided elements first.",
            )

    def decode(self, source: Memory, nbytes: int, to: Buffer, stream: Stream) -> Pending:
        """Queue the decoding of `nbytes` of `source` into `to`."""
        return self.decode_reduce(source, nbytes, to, "replace", stream)

    def broken(self, count: int, got: str) -> DecodeError:
        """Make the error for bytes that are no encoding of `count` elements."""
        return DecodeError(
            f"codec {self.spec}",
            expected=f"a stream of {count} elements",
            got=got,
            remedy="The bytes were damaged or cut short on their way, or another codec wrote them.",
        )

    def refuse(self, count: int, got: str) -> Pending:
        """Answer at once that the bytes are no encoding of `count` elements."""

        def answer() -> None:
            raise self.broken(count, got)

        return Pending(_at_once, answer)

    def decoded(self, count: int, nbytes: int, size: int, status: int) -> int:
        """Read a decoder's answer: the bytes that were used."""
        if status & BAD_STREAM:
            raise self.broken(count, "bytes that are none")
        return nbytes

    @staticmethod
    def after(stream: Stream, nbytes: int) -> Pending:
        """Answer `nbytes` when the stream has come so far."""
        event = stream.record()

        def answer() -> int:
            event.wait()
            return nbytes

        return Pending(event.done, answer)

    @staticmethod
    def empty() -> Pending:
        """Answer at once: no elements are no bytes."""
        return Pending(_at_once, partial(int, 0))


def _at_once() -> bool:
    return True


def _outlast(memory: Memory) -> None:
    """Do nothing: a stream keeps what its queued work refers to."""


# Codecs whose encodings have a size that is known in advance, and that one kernel makes.


class FixedCodec(KernelCodec):
    """A codec of fixed size; a chunk with values that the format has no room for travels raw."""

    tile: ClassVar[int]
    """Elements in a tile of its kernels."""

    @abstractmethod
    def encoded_size(self, count: int, dtype: DType) -> int:
        """Bytes of an encoding, which do not depend on the values."""

    @abstractmethod
    def kernel(self, way: str, dtype: DType) -> str:
        """Name the kernel that does `encode` or `decode`."""

    def settings(self, dtype: DType) -> tuple[int, ...]:
        """Return what the kernels want to know besides."""
        return ()

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Bytes of an encoding."""
        return self.encoded_size(count, dtype)

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the encoding."""
        self.check_encode(source, to, stream)
        if not source.count:
            return self.empty()
        mailbox, nbytes = Mailbox(stream), self.encoded_size(source.count, source.dtype)
        args = (source.address, source.count, to.address, *self.settings(source.dtype), mailbox.status)
        stream.launch(self.kernel("encode", source.dtype), -(-source.count // self.tile), *args)
        return mailbox.send(stream, lambda size, status: None if status & NOT_FINITE else nbytes)

    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        """Queue the decoding; every stream of the right length is one."""
        self.check_decode(source, nbytes, to, op, stream)
        if nbytes != self.encoded_size(to.count, to.dtype):
            return self.refuse(to.count, f"{nbytes} bytes instead of {self.encoded_size(to.count, to.dtype)}")
        if not to.count:
            return self.empty()
        args = (source.address, to.count, to.address, *self.settings(to.dtype), OPS[op])
        stream.launch(self.kernel("decode", to.dtype), -(-to.count // self.tile), *args)
        return self.after(stream, nbytes)


# Codecs whose streams are tiles of varying size: the sizes first, then the tiles (kernels/tiles.h).


@dataclass(frozen=True)
class Tiling:
    """How elements of one type are cut into tiles, and the bytes that go with them."""

    values: int
    """Elements in a tile."""
    slot: int
    """Bytes that an encoded tile never exceeds."""
    header: int = 0
    """Bytes in front of everything."""
    table: int = 0
    """Bytes that a table never exceeds, which then travels as one more tile before the others."""
    grain: int = 64
    """The fewest tiles that are worth waking another core for."""

    def tiles(self, count: int) -> int:
        """Count the tiles of elements."""
        return -(-count // self.values)

    def entries(self, count: int) -> int:
        """Count the tiles, the table's included."""
        return self.tiles(count) + bool(self.table)

    def end_of_sizes(self, count: int) -> int:
        """Bytes of the header and the sizes."""
        return self.header + 4 * self.entries(count)

    def front(self, count: int) -> int:
        """Bytes before the first tile: the header and the sizes, so that tiles start at a multiple of 8."""
        return -(-self.end_of_sizes(count) // 8) * 8

    def room(self, count: int) -> int:
        """Bytes that all tiles never exceed."""
        return self.table + self.tiles(count) * self.slot


@dataclass(frozen=True)
class EncodeJob:
    """The addresses that an encoder's kernels work with."""

    source: Buffer
    tiles: int
    header: int
    sizes: int
    starts: int
    slots: int
    extra: int


class TiledCodec(KernelCodec):
    """A codec with a stream of tiles."""

    @abstractmethod
    def tiling(self, dtype: DType) -> Tiling:
        """Say how elements of this type are cut."""

    @abstractmethod
    def encode_tiles(self, job: EncodeJob, stream: Stream) -> None:
        """Queue the kernels that write the tiles (and the table) to their slots, with their sizes and starts."""

    @abstractmethod
    def decode_tiles(
        self, header: int, tiles: int, offsets: int, extra: int, to: Buffer, op: int, status: int, stream: Stream
    ) -> None:
        """Queue the kernels that read the tiles, whose offsets have been checked, onto `to`."""

    def encode_extra(self, count: int, dtype: DType) -> int:
        """Bytes of scratch memory that `encode_tiles` wants besides."""
        return 0

    def decode_extra(self, dtype: DType) -> int:
        """Bytes of scratch memory that `decode_tiles` wants besides."""
        return 0

    def max_encoded(self, count: int, dtype: DType) -> int:
        """Bytes that an encoding of `count` elements never exceeds."""
        tiling = self.tiling(dtype)
        return tiling.front(count) + tiling.room(count) if count else 0

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the encoding; where tiles get slots of their own, they are joined at the end."""
        self.check_encode(source, to, stream)
        if not source.count:
            return self.empty()
        tiling, count, in_place = self.tiling(source.dtype), source.count, stream.device.appends_in_place
        entries, front = tiling.entries(count), tiling.front(count)
        offsets = 8 * entries
        extra = offsets + 8 * entries
        slots = extra + -(-self.encode_extra(count, source.dtype) // 256) * 256
        scratch = stream.device.alloc(slots + (0 if in_place else tiling.room(count)))
        job = EncodeJob(
            source,
            tiling.tiles(count),
            header=to.address,
            sizes=to.address + tiling.header,
            starts=scratch.address,
            slots=to.address + front if in_place else scratch.address + slots,
            extra=scratch.address + extra,
        )
        mailbox, end_of_sizes = Mailbox(stream), tiling.end_of_sizes(count)
        if end_of_sizes < front:  # what was in this memory before must not travel
            stream.fill(to.address + end_of_sizes, 0, front - end_of_sizes)
        self.encode_tiles(job, stream)
        stream.launch("tiles_offsets", 1, job.sizes, entries, scratch.address + offsets, mailbox.size)
        joined = (job.slots, job.starts, job.sizes, scratch.address + offsets, to.address + front)
        stream.launch("tiles_join", entries, *joined, split=not in_place)
        stream.release(scratch)
        return mailbox.send(stream, lambda size, status: front + size)

    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        """Queue the decoding; nothing in the bytes is believed before it is checked."""
        self.check_decode(source, nbytes, to, op, stream)
        tiling, count = self.tiling(to.dtype), to.count
        front = tiling.front(count) if count else 0
        if nbytes < front or (nbytes and not count):
            return self.refuse(count, f"{nbytes} bytes")
        if not count:
            return self.empty()
        entries = tiling.entries(count)
        extra = 8 * (entries + 1)
        scratch = stream.device.alloc(extra + self.decode_extra(to.dtype))
        mailbox = Mailbox(stream)
        sizes, tiles = source.address + tiling.header, source.address + front
        largest = max(tiling.slot, tiling.table)
        stream.launch("tiles_open", 1, sizes, entries, nbytes - front, scratch.address, 4, largest, mailbox.status)
        self.decode_tiles(
            source.address, tiles, scratch.address, scratch.address + extra, to, OPS[op], mailbox.status, stream
        )
        stream.release(scratch)
        return mailbox.send(stream, partial(self.decoded, count, nbytes))


# Packages that some codecs need and that may be missing.


def needed(package: str, topic: str, remedy: str) -> Any:
    """Import a package for what `topic` names, or say how to get it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise DeviceError(topic, expected=f"the package {package}", got=str(error), remedy=remedy) from error
