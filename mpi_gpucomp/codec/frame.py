"""The frame of a chunk on the wire: a header of 48 bytes that says what follows, then the encoded bytes.

    offset  bytes
         0      4   magic "GPCF"
         4      1   version of this layout
         5      1   flags: 1 raw (the payload is the plain bytes), 2 checked (there is a checksum)
         6      1   element type (device.dtype)
         7      1   zero
         8      4   wire id of the codec
        12      4   checksum: Adler-32 of the header with zeros in this place, followed by the payload
        16      8   sequence: the number of the chunk
        24      8   plain length in bytes
        32      8   encoded length in bytes
        40      8   zero

All numbers are little-endian. The length keeps the payload aligned for every kernel. A chunk that does not shrink, or
that its codec cannot hold, travels raw.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.codec.base import Pending
from mpi_gpucomp.codec.raw import Raw
from mpi_gpucomp.device import library
from mpi_gpucomp.device.base import DType, dtype_of_code
from mpi_gpucomp.errors import FrameError

if TYPE_CHECKING:
    from mpi_gpucomp.codec.base import Codec
    from mpi_gpucomp.device.base import Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer

__all__ = ["HEADER_BYTES", "VERSION", "FrameHeader", "decode", "encode", "parse", "read_header", "room", "verify"]

MAGIC, VERSION = b"GPCF", 1
RAW, CHECKED = 1, 2
LAYOUT = struct.Struct("<4sBBBBIIQQQQ")
HEADER_BYTES = LAYOUT.size
CHECKSUM_TILE = 4096
ADLER = 65521


@dataclass(frozen=True)
class FrameHeader:
    """What a frame says of its payload."""

    wire_id: int
    dtype: DType
    sequence: int
    plain: int
    encoded: int
    raw: bool = False
    checked: bool = True
    checksum: int = 0

    def pack(self) -> bytes:
        """Return the bytes of the header."""
        return self._packed(self.checksum)

    def seal(self, payload: int) -> int:
        """Return the checksum that the header should have, given that of the payload."""
        return _joined(self._packed(0), payload, self.encoded)

    def sealed(self, payload: int) -> FrameHeader:
        """Return the header with its checksum, given that of the payload."""
        return replace(self, checksum=self.seal(payload))

    def _packed(self, checksum: int) -> bytes:
        flags = RAW * self.raw | CHECKED * self.checked
        kind = (MAGIC, VERSION, flags, self.dtype.code, 0, self.wire_id)
        return LAYOUT.pack(*kind, checksum, self.sequence, self.plain, self.encoded, 0)


def parse(data: bytes, *, where: str = "frame") -> FrameHeader:
    """Read a header that nobody vouches for; `where` names the frame in errors."""
    if len(data) < HEADER_BYTES:
        raise _broken(where, f"a header of {HEADER_BYTES} bytes", f"{len(data)} bytes")
    magic, version, flags, code, zero, wire_id, checksum, sequence, plain, encoded, zeros = LAYOUT.unpack_from(data)
    if magic != MAGIC:
        raise _broken(where, f"the magic bytes {MAGIC.hex()}", magic.hex())
    if version != VERSION:
        raise _broken(where, f"version {VERSION}", f"version {version}", "Run the same release on every rank.")
    dtype = dtype_of_code(code)
    unchecked = checksum and not flags & CHECKED
    if dtype is None or zero or zeros or unchecked or flags & ~(RAW | CHECKED):
        raise _broken(where, "known flags, an element type and zeros", f"{data[4:8].hex()} and {data[40:48].hex()}")
    header = FrameHeader(wire_id, dtype, sequence, plain, encoded, bool(flags & RAW), bool(flags & CHECKED), checksum)
    if plain % dtype.itemsize or (header.raw and encoded != plain):
        raise _broken(where, f"lengths that fit {dtype} elements", f"{plain} plain and {encoded} encoded bytes")
    return header


def room(codec: Codec, count: int, dtype: DType) -> int:
    """Bytes that a frame of `count` elements never exceeds."""
    return HEADER_BYTES + max(codec.max_encoded(count, dtype), count * dtype.itemsize)


def encode(
    codec: Codec,
    source: Buffer,
    to: Memory,
    sequence: int,
    stream: Stream,
    *,
    checked: bool = True,
    raw: bool = False,
) -> Pending:
    """Queue the encoding of a chunk as a frame in `to`, which holds `room` bytes; the answer is its length.

    With `raw` it is not encoded, as one that does not shrink.
    """
    payload = to.part(HEADER_BYTES, to.nbytes - HEADER_BYTES)
    pending = (Raw() if raw else codec).encode(source, payload, stream)
    expected = source.nbytes if raw else codec.encoded_size(source.count, source.dtype)
    early = _Checksum(payload.address, expected, stream) if checked and expected is not None else None

    def answer() -> int:
        try:
            size = pending.result()
        except Exception:
            if early:
                early.discard()
            raise
        unfit = size is None or (size >= source.nbytes > 0 and not isinstance(codec, Raw))
        if unfit and not raw:
            size = Raw().encode(source, payload, stream).result()
            if early:
                early.discard()
        assert size is not None
        header = FrameHeader(codec.wire_id, source.dtype, sequence, source.nbytes, size, raw or unfit, checked)
        if checked:
            reused = early if raw or not unfit else None
            header = header.sealed(reused.value() if reused else _of_written(payload.address, size, stream))
        _write(header.pack(), to, stream)
        return HEADER_BYTES + size

    return Pending(pending.done, answer)


def read_header(source: Memory, stream: Stream, *, where: str = "frame") -> FrameHeader:
    """Read the header of the frame in `source`, wherever that is; waits for the stream."""
    nbytes = min(HEADER_BYTES, source.nbytes)
    with stream.device.pinned(HEADER_BYTES) as here:
        stream.copy(here.address, source.address, nbytes)
        stream.synchronize()
        return parse(ctypes.string_at(here.address, nbytes), where=where)


def verify(header: FrameHeader, source: Memory, stream: Stream, *, where: str = "frame") -> None:
    """Raise unless the payload behind a header is whole and its checksum right; waits for the stream."""
    if HEADER_BYTES + header.encoded > source.nbytes:
        raise _broken(where, f"{HEADER_BYTES + header.encoded} bytes", f"{source.nbytes}")
    if header.checked:
        _check(header, _of_written(source.address + HEADER_BYTES, header.encoded, stream), where)


def decode(
    codec: Codec,
    header: FrameHeader,
    source: Memory,
    to: Buffer,
    stream: Stream,
    *,
    op: str = "replace",
    sequence: int | None = None,
    where: str = "frame",
    verified: bool = False,
) -> Pending:
    """Queue the decoding of the frame in `source` onto `to`; its checksum is looked at, unless it was `verified`."""
    _check_agreement(codec, header, source, to, sequence, where)
    payload = source.part(HEADER_BYTES, header.encoded)
    checksum = None if verified or not header.checked else _Checksum(payload.address, header.encoded, stream)
    # Damage that would spoil what is there already, or the device, is looked for first; else it is found at the end.
    if checksum and (op != "replace" or not codec.tolerates_damage(stream)):
        _check(header, checksum.value(), where)
        checksum = None
    pending = (Raw() if header.raw else codec).decode_reduce(payload, header.encoded, to, op, stream)

    def answer() -> int | None:
        if checksum:
            _check(header, checksum.value(), where)
        return pending.result()

    return Pending(pending.done, answer) if checksum else pending


def _check(header: FrameHeader, payload: int, where: str) -> None:
    if header.seal(payload) != header.checksum:
        raise _broken(where, f"the checksum {header.checksum:#010x}", "another one")


def _check_agreement(
    codec: Codec, header: FrameHeader, source: Memory, to: Buffer, sequence: int | None, where: str
) -> None:
    """Raise unless the header says what the receiver expects."""
    agree = "Pass the same codec, type and count on every rank."
    if header.wire_id != codec.wire_id:
        raise _broken(where, f"codec {codec.spec} (wire id {codec.wire_id:#x})", f"wire id {header.wire_id:#x}", agree)
    if header.dtype != to.dtype or header.plain != to.nbytes:
        got = f"{header.plain} bytes of {header.dtype}"
        raise _broken(where, f"{to.nbytes} bytes of {to.dtype}", got, agree)
    if sequence is not None and header.sequence != sequence:
        raise _broken(where, f"chunk {sequence}", f"chunk {header.sequence}")
    if HEADER_BYTES + header.encoded > source.nbytes:
        raise _broken(where, f"{HEADER_BYTES + header.encoded} bytes", f"{source.nbytes}")


class _Checksum:
    """The Adler-32 of bytes on a stream's device, queued when it is made."""

    def __init__(self, address: int, nbytes: int, stream: Stream) -> None:
        tiles, device, self._stream = -(-nbytes // CHECKSUM_TILE), stream.device, stream
        partial = device.alloc(8 * tiles)
        self._result = device.pinned(4)
        stream.launch("checksum_tiles", tiles, address, nbytes, partial.address)
        stream.launch("checksum_join", 1, partial.address, nbytes, self._result.address)
        stream.release(partial)
        self._event = stream.record()

    def discard(self) -> None:
        """Give the memory back without asking for the number."""
        self._stream.release(self._result)

    def value(self) -> int:
        """Wait for the number; asked once."""
        self._event.wait()
        with self._result as result:
            return ctypes.c_uint32.from_address(result.address).value


def _of_written(address: int, nbytes: int, stream: Stream) -> int:
    """Return the Adler-32 of bytes that are there already, whatever the stream has still to do."""
    if stream.device.name != "host":
        return _Checksum(address, nbytes, stream).value()
    # On the host without the stream: others' work may be queued there, and this is far shorter than to wait for it.
    tiles = -(-nbytes // CHECKSUM_TILE)
    if len(_here.partials) <= tiles:
        _here.partials = (ctypes.c_uint64 * (tiles + 1))()
    result = ctypes.addressof(_here.partials)
    for kernel, items, args in (
        ("checksum_tiles", tiles, (address, nbytes, result + 8)),
        ("checksum_join", 1, (result + 8, nbytes, result)),
    ):
        library.kernel(kernel)(ctypes.c_int64(0), ctypes.c_int64(items), *library.arguments(args))
    return int(_here.partials[0]) & 0xFFFFFFFF


class _Here(threading.local):
    """Room for the sums of one thread."""

    def __init__(self) -> None:
        self.partials: Any = (ctypes.c_uint64 * 1)()


_here = _Here()


def _joined(front: bytes, payload: int, nbytes: int) -> int:
    """Return the Adler-32 of `front` followed by `nbytes` bytes whose Adler-32 is `payload`."""
    first = zlib.adler32(front)
    low = ((first & 0xFFFF) + (payload & 0xFFFF) - 1) % ADLER
    high = ((first >> 16) + (payload >> 16) + nbytes * ((first & 0xFFFF) - 1)) % ADLER
    return high << 16 | low


def _write(header: bytes, to: Memory, stream: Stream) -> None:
    """Put the header in front of a payload that is there."""
    if stream.device.name == "host":
        ctypes.memmove(to.address, header, HEADER_BYTES)
        return
    here = stream.device.pinned(HEADER_BYTES)
    ctypes.memmove(here.address, header, HEADER_BYTES)
    stream.copy(to.address, here.address, HEADER_BYTES)
    stream.release(here)


def _broken(where: str, expected: str, got: str, remedy: str = "") -> FrameError:
    return FrameError(
        where,
        expected=expected,
        got=got,
        remedy=remedy or "The frame was damaged or cut short on its way, or something else wrote to this buffer.",
    )
