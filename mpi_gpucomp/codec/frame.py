"""The frame of a chunk on the wire: a header of 48 bytes, then the payload (encoded bytes, or raw ones).

    offset  bytes
         0      4   magic "GPCF"
         4      1   version of this layout
         5      1   flags: 1 raw (the payload is not encoded), 2 checked (there is a checksum)
         6      1   element type (device.base.DTYPES)
         7      1   zero
         8      4   wire id of the codec
        12      4   checksum: Adler-32 of header and payload, with zeros in this field
        16      8   sequence number of the chunk
        24      8   decoded length in bytes
        32      8   payload length in bytes
        40      8   zero

All numbers are little-endian. The length of the header keeps the payload aligned for every kernel. A chunk that does
not shrink, or that its codec cannot represent, is sent raw.
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

__all__ = [
    "HEADER_BYTES",
    "VERSION",
    "FrameHeader",
    "decode",
    "encode",
    "max_frame_bytes",
    "parse",
    "read_header",
    "verify",
]

MAGIC, VERSION = b"GPCF", 1
RAW, CHECKED = 1, 2
LAYOUT = struct.Struct("<4sBBBBIIQQQQ")
HEADER_BYTES = LAYOUT.size
CHECKSUM_TILE = 4096
ADLER = 65521


@dataclass(frozen=True)
class FrameHeader:
    """The header of a frame."""

    wire_id: int
    dtype: DType
    sequence: int
    decoded_bytes: int
    payload_bytes: int
    raw: bool = False
    checked: bool = True
    checksum: int = 0

    def pack(self) -> bytes:
        """Return the header as bytes."""
        return self._pack(self.checksum)

    def expected_checksum(self, payload: int) -> int:
        """Return the checksum of the frame, given the payload's."""
        return _combine_adler32(self._pack(0), payload, self.payload_bytes)

    def with_checksum(self, payload: int) -> FrameHeader:
        """Return the header with its checksum set, given the payload's."""
        return replace(self, checksum=self.expected_checksum(payload))

    def _pack(self, checksum: int) -> bytes:
        flags = RAW * self.raw | CHECKED * self.checked
        kind = (MAGIC, VERSION, flags, self.dtype.code, 0, self.wire_id)
        return LAYOUT.pack(*kind, checksum, self.sequence, self.decoded_bytes, self.payload_bytes, 0)


def parse(data: bytes, *, where: str = "frame") -> FrameHeader:
    """Read and validate an untrusted header; `where` names the frame in errors."""
    if len(data) < HEADER_BYTES:
        raise _invalid(where, f"a header of {HEADER_BYTES} bytes", f"{len(data)} bytes")
    magic, version, flags, code, zero, wire_id, checksum, sequence, decoded, payload, zeros = LAYOUT.unpack_from(data)
    if magic != MAGIC:
        raise _invalid(where, f"the magic bytes {MAGIC.hex()}", magic.hex())
    if version != VERSION:
        raise _invalid(where, f"version {VERSION}", f"version {version}", "Run the same release on every rank.")
    dtype = dtype_of_code(code)
    unchecked = checksum and not flags & CHECKED
    if dtype is None or zero or zeros or unchecked or flags & ~(RAW | CHECKED):
        raise _invalid(where, "known flags, an element type and zeros", f"{data[4:8].hex()} and {data[40:48].hex()}")
    header = FrameHeader(wire_id, dtype, sequence, decoded, payload, bool(flags & RAW), bool(flags & CHECKED), checksum)
    if decoded % dtype.itemsize:
        raise _invalid(where, f"a multiple of {dtype.itemsize} bytes for {dtype} elements", f"{decoded} decoded bytes")
    if header.raw and payload != decoded:
        raise _invalid(where, f"a raw payload of {decoded} bytes", f"{payload}")
    return header


def max_frame_bytes(codec: Codec, count: int, dtype: DType) -> int:
    """Return an upper bound for the bytes of a frame of `count` elements."""
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
    """Queue the encoding of a chunk as a frame in `to`, of at least `max_frame_bytes`; the result is its length.

    With `raw` the chunk is not encoded.
    """
    payload = to.part(HEADER_BYTES, to.nbytes - HEADER_BYTES)
    pending = (Raw() if raw else codec).encode(source, payload, stream)
    expected = source.nbytes if raw else codec.encoded_size(source.count, source.dtype)
    # A payload of known size is checksummed behind its encoding, without waiting for that.
    queued = _Checksum(payload.address, expected, stream) if checked and expected is not None else None

    def result() -> int:
        try:
            size = pending.result()
        except Exception:
            if queued:
                queued.discard()
            raise
        fallback = size is None or (size >= source.nbytes > 0 and not isinstance(codec, Raw))
        if fallback and not raw:
            size = Raw().encode(source, payload, stream).result()
            if queued:
                queued.discard()
        assert size is not None
        header = FrameHeader(codec.wire_id, source.dtype, sequence, source.nbytes, size, raw or fallback, checked)
        if checked:
            reused = queued if raw or not fallback else None
            header = header.with_checksum(reused.value() if reused else _checksum_now(payload.address, size, stream))
        _write_header(header.pack(), to, stream)
        return HEADER_BYTES + size

    return Pending(pending.done, result)


def read_header(source: Memory, stream: Stream, *, where: str = "frame") -> FrameHeader:
    """Read the header of the frame in `source`, in host or device memory; synchronises the stream."""
    nbytes = min(HEADER_BYTES, source.nbytes)
    with stream.device.pinned(HEADER_BYTES) as pinned:
        stream.copy(pinned.address, source.address, nbytes)
        stream.synchronize()
        return parse(ctypes.string_at(pinned.address, nbytes), where=where)


def verify(header: FrameHeader, source: Memory, stream: Stream, *, where: str = "frame") -> None:
    """Raise unless the payload is complete and its checksum right; blocks."""
    if HEADER_BYTES + header.payload_bytes > source.nbytes:
        raise _invalid(where, f"{HEADER_BYTES + header.payload_bytes} bytes", f"{source.nbytes}")
    if header.checked:
        _check(header, _checksum_now(source.address + HEADER_BYTES, header.payload_bytes, stream), where)


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
    """Queue the decoding of the frame in `source` into `to`; its checksum is checked unless it was `verified`."""
    _check_agreement(codec, header, source, to, sequence, where)
    payload = source.part(HEADER_BYTES, header.payload_bytes)
    checksum = None if verified or not header.checked else _Checksum(payload.address, header.payload_bytes, stream)
    # Checked before decoding if damaged bytes could corrupt a reduction or crash the device, otherwise afterwards.
    if checksum and (op != "replace" or not codec.tolerates_damage(stream)):
        _check(header, checksum.value(), where)
        checksum = None
    pending = (Raw() if header.raw else codec).decode_reduce(payload, header.payload_bytes, to, op, stream)

    def result() -> int | None:
        if checksum:
            _check(header, checksum.value(), where)
        return pending.result()

    return Pending(pending.done, result) if checksum else pending


def _check(header: FrameHeader, payload: int, where: str) -> None:
    found = header.expected_checksum(payload)
    if found != header.checksum:
        raise _invalid(where, f"the checksum {header.checksum:#010x}", f"{found:#010x}")


def _check_agreement(
    codec: Codec, header: FrameHeader, source: Memory, to: Buffer, sequence: int | None, where: str
) -> None:
    """Raise unless the header matches the receiver's codec, buffer and sequence number."""
    remedy = "Pass the same codec, type and count on every rank."
    if header.wire_id != codec.wire_id:
        raise _invalid(
            where, f"codec {codec.spec} (wire id {codec.wire_id:#x})", f"wire id {header.wire_id:#x}", remedy
        )
    if header.dtype != to.dtype or header.decoded_bytes != to.nbytes:
        got = f"{header.decoded_bytes} bytes of {header.dtype}"
        raise _invalid(where, f"{to.nbytes} bytes of {to.dtype}", got, remedy)
    if sequence is not None and header.sequence != sequence:
        raise _invalid(where, f"chunk {sequence}", f"chunk {header.sequence}")
    if HEADER_BYTES + header.payload_bytes > source.nbytes:
        raise _invalid(where, f"{HEADER_BYTES + header.payload_bytes} bytes", f"{source.nbytes}")


class _Checksum:
    """The Adler-32 of bytes on a stream's device, queued by the constructor."""

    def __init__(self, address: int, nbytes: int, stream: Stream) -> None:
        tiles, device, self._stream = -(-nbytes // CHECKSUM_TILE), stream.device, stream
        partial = device.alloc(8 * tiles)
        self._result = device.pinned(4)
        stream.launch("checksum_tiles", tiles, address, nbytes, partial.address)
        stream.launch("checksum_join", 1, partial.address, nbytes, self._result.address)
        stream.release(partial)
        self._event = stream.record()

    def discard(self) -> None:
        """Release the memory without reading the checksum."""
        self._stream.release(self._result)

    def value(self) -> int:
        """Block until the checksum is available and return it; call once."""
        self._event.wait()
        with self._result as result:
            return ctypes.c_uint32.from_address(result.address).value


def _checksum_now(address: int, nbytes: int, stream: Stream) -> int:
    """Return the Adler-32 of bytes that are complete, on the host without waiting for the stream."""
    if stream.device.name != "host":
        return _Checksum(address, nbytes, stream).value()
    # In this thread: the stream may have a queue of other work, which takes far longer than the checksum.
    tiles = -(-nbytes // CHECKSUM_TILE)
    if len(_scratch.partials) <= tiles:
        _scratch.partials = (ctypes.c_uint64 * (tiles + 1))()
    result = ctypes.addressof(_scratch.partials)
    for kernel, items, args in (
        ("checksum_tiles", tiles, (address, nbytes, result + 8)),
        ("checksum_join", 1, (result + 8, nbytes, result)),
    ):
        library.kernel(kernel)(ctypes.c_int64(0), ctypes.c_int64(items), *library.arguments(args))
    return int(_scratch.partials[0]) & 0xFFFFFFFF


class _Scratch(threading.local):
    """Per-thread memory for the partial sums of `_checksum_now`."""

    def __init__(self) -> None:
        self.partials: Any = (ctypes.c_uint64 * 1)()


_scratch = _Scratch()


def _combine_adler32(front: bytes, payload: int, nbytes: int) -> int:
    """Return the Adler-32 of `front` followed by `nbytes` bytes whose Adler-32 is `payload`."""
    first = zlib.adler32(front)
    low = ((first & 0xFFFF) + (payload & 0xFFFF) - 1) % ADLER
    high = ((first >> 16) + (payload >> 16) + nbytes * ((first & 0xFFFF) - 1)) % ADLER
    return high << 16 | low


def _write_header(header: bytes, to: Memory, stream: Stream) -> None:
    """Write the header before its payload."""
    if stream.device.name == "host":
        ctypes.memmove(to.address, header, HEADER_BYTES)
        return
    pinned = stream.device.pinned(HEADER_BYTES)
    ctypes.memmove(pinned.address, header, HEADER_BYTES)
    stream.copy(to.address, pinned.address, HEADER_BYTES)
    stream.release(pinned)


def _invalid(where: str, expected: str, got: str, remedy: str = "") -> FrameError:
    return FrameError(
        where,
        expected=expected,
        got=got,
        remedy=remedy or "The frame was damaged or truncated in transit, or the buffer was overwritten.",
    )
