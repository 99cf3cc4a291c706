"""Point-to-point messages under mpi4py's names: framed, with a codec and pipelined, or passed through.

Without a codec a call is passed through to the MPI library. With one, messages are sent in frames on a communicator of
their own, and the receiver must expect frames too: by the communicator's codec, or by `codec=` on the call. The sender
alone chooses the codec and the chunk size. Probe sees every message. With a codec of the communicator, mpi4py's other
calls (Ssend, Bsend, send, ...) use the communicator of the frames too, so that MPI keeps the order of all messages, and
a receive takes whatever arrives.

A communicator whose codec is "auto" passes messages through: two ranks that have not communicated cannot agree that
frames pay off. `codec="auto"` on both calls uses frames.

The envelope of a framed message travels under the caller's tag, so that MPI matches messages and keeps their order. A
short message is in the envelope as a whole, as a raw frame. Otherwise the envelope announces frames that follow under a
tag of the sender's choice, at most DEPTH in memory at a time: one is encoded while another is on the wire, and decoded
beside the wire. A sender that fails sends an error notice in a frame's place.

On rails no message is passed through: without a codec it travels in raw chunks without frames, out of the sender's
memory and into the receiver's where the wire can access it, and through pinned memory where it cannot.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections import deque
from contextlib import suppress
from copy import copy
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpi_gpucomp._call.buffers import UnsupportedError, read_blocks
from mpi_gpucomp._call.calls import Call, check_options
from mpi_gpucomp._call.staging import HostStaging, PackedBuffers, device_of, mpi4py_accepts, wait_for_producers
from mpi_gpucomp._dispatch.envelopes import MpiEnvelopes, PostedRecv, RailEnvelopes
from mpi_gpucomp._tuning.model import DEFAULT_CHUNK
from mpi_gpucomp.codec import frame, get_codec
from mpi_gpucomp.device import order_after
from mpi_gpucomp.device.base import dtype_of_code
from mpi_gpucomp.device.producer import stream_handle
from mpi_gpucomp.engine.coder import INLINE_BYTES, Coder
from mpi_gpucomp.errors import BufferSpecError, FrameError, PeerError
from mpi_gpucomp.monitor.recorder import gpu_range
from mpi_gpucomp.request import NativeRequest, Request
from mpi_gpucomp.trace import DECODE, ENCODE, NO_CALL_TRACE, NO_TRACE
from mpi_gpucomp.transport.gpu_aware import cuda_aware

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from mpi_gpucomp._dispatch.envelopes import Arrival, EnvelopeChannel, SentEnvelope
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.device import Buffer
    from mpi_gpucomp.engine.program import Blocks

    Ready = Callable[[], bool]
    Steps = Generator[Ready, None, None]
    from mpi_gpucomp._dispatch.plan import Settings
    from mpi_gpucomp._dispatch.runtime import Runtime
    from mpi_gpucomp.codec import Pending
    from mpi_gpucomp.core.wire import Transfer, Wire
    from mpi_gpucomp.device import Device, DType, Memory
    from mpi_gpucomp.trace import CallTrace, Trace

__all__ = [
    "DEPTH",
    "ERROR_NOTICE",
    "MIN_FRAME_BYTES",
    "RAW_BYTES",
    "RAW_DEPTH",
    "Announcement",
    "FrameChannel",
    "MatchedMessage",
    "MessageOperation",
    "P2PRequest",
    "PointToPoint",
    "RecvOperation",
    "SendOperation",
    "damaged_envelope",
]


AHEAD = 2
"""Receives that are posted ahead."""
DEPTH = 3
"""Frames of one message in memory at a time."""
RAW_BYTES, RAW_DEPTH = 1 << 22, 8
"""Size of raw chunks, and how many are in flight at a time if they need no staging memory."""
ERROR_NOTICE = b"GPCE"
"""The magic bytes of an error notice."""


class MessageOperation:
    """A message in flight: a point-to-point operation of the engine, whose generator yields what it waits for."""

    def __init__(self, channel: FrameChannel, blocks: Blocks, *, writable: bool) -> None:
        """Allocate the envelope; subclasses post it and provide `_steps`."""
        self.done = False
        self.error: BaseException | None = None
        self._channel, self._blocks, self._writable = channel, blocks, writable
        self._device = device_of(blocks)
        self._packed = PackedBuffers(self._device)
        self._envelope_memory = self._device.pinned(channel.envelope_bytes)
        self._coder: Coder | None = None
        self._trace: CallTrace = NO_CALL_TRACE
        self._inline = True
        self._pending_error: Exception | None = None
        """Raised once nothing of the message is in flight any more."""
        self._ready: Ready = lambda: True
        self._steps: Steps

    def progress(self) -> bool:
        """Progress as far as possible without waiting; return True if anything moved."""
        moved = False
        try:
            while not self.done and self._step():
                moved = True
        except Exception:
            self._release(failed=True)
            raise
        return moved

    def _step(self) -> bool:
        """Run to the next wait, if the current one is over."""
        try:
            try:
                if not self._ready():
                    return False
            except Exception as error:
                self._ready = self._steps.throw(error)
            else:
                self._ready = next(self._steps)
        except StopIteration:
            self._release(failed=False)
            self.done = True
        return True

    def _elements(self, codec: Codec, *, inline: bool) -> Buffer:
        """Take a coder, and return the elements in memory that it can work on."""
        self._inline = inline
        self._coder = coder = self._channel.coder(codec, self._device, inline)
        order_after(self._blocks.buffer, coder.stream)
        view = self._packed.device_view(self._blocks, writable=self._writable)
        assert view is not None
        self._packed.pack(coder.stream)
        return view.buffer.slice(view.starts[0], view.counts[0])

    def _coder_reached(self) -> Ready:
        """Return a test for the completion of everything queued on the coder so far."""
        assert self._coder is not None
        return self._coder.stream.record().done

    @property
    def _depth(self) -> int:
        """Return how many raw chunks may be in flight."""
        assert self._coder is not None
        return RAW_DEPTH if self._coder.works_in_place else DEPTH

    def _envelope_in_use(self) -> bool:
        """Return True if MPI may still access the memory of the envelope."""
        return False

    def _release(self, *, failed: bool) -> None:
        """Release the resources of the message, unless MPI still uses them."""
        self._trace.end(failed=failed)
        if not self._envelope_in_use():
            self._envelope_memory.release()
        coder, self._coder = self._coder, None
        if coder is not None and failed:
            with suppress(Exception):  # one has been raised already
                coder.close()
        elif coder is not None:
            self._channel.return_coder(coder, self._inline)


MIN_FRAME_BYTES = 1024
"""The least size of an envelope or frame buffer: an announcement or an error notice always fits."""
MAGIC, LAYOUT = b"GPCA", struct.Struct("<4sIBQQQI")


class Announcement(NamedTuple):
    """Announces the frames that follow an envelope."""

    dtype: DType
    nbytes: int
    """Size of the message."""
    chunk_bytes: int
    """Size of a chunk; the last may be shorter."""
    room: int
    """The largest size of a frame."""
    tag: int
    """The tag of the frames."""
    codec: str
    """Empty for raw chunks without frames."""

    def pack(self) -> bytes:
        """Return its bytes, with a checksum of the rest after the magic."""
        numbers = self.dtype.code, self.nbytes, self.chunk_bytes, self.room, self.tag
        body = LAYOUT.pack(MAGIC, 0, *numbers) + self.codec.encode()
        assert len(body) <= MIN_FRAME_BYTES, f"codec spec too long: {self.codec}"
        return body[:4] + struct.pack("<I", zlib.adler32(body)) + body[8:]

    @staticmethod
    def begins(data: bytes) -> bool:
        """Return True if an envelope holds an announcement."""
        return data.startswith(MAGIC)

    @classmethod
    def read(cls, data: bytes, where: str) -> Announcement:
        """Parse the bytes of `pack`; `where` names the message in errors."""
        body = data[:4] + bytes(4) + data[8:]
        if len(data) < LAYOUT.size or struct.pack("<I", zlib.adler32(body)) != data[4:8]:
            raise damaged_envelope(where)
        _, _, code, nbytes, chunk_bytes, room, tag = LAYOUT.unpack_from(data)
        dtype = dtype_of_code(code)
        assert dtype is not None, "the checksum is right"
        return cls(dtype, nbytes, chunk_bytes, room, tag, data[LAYOUT.size :].decode())


def damaged_envelope(where: str) -> FrameError:
    """Make the error of a corrupted envelope."""
    return FrameError(
        where,
        expected="an envelope with a valid checksum",
        got="a checksum mismatch",
        remedy="The message was corrupted or truncated in transit, or its buffer was overwritten.",
    )


class FrameChannel:
    """What the framed messages of one communicator share: envelopes, wire and a pool of coders."""

    def __init__(
        self, envelopes: EnvelopeChannel, wire: Wire, short: int, longest: int, trace: Trace = NO_TRACE
    ) -> None:
        """Send messages of up to `short` bytes within an envelope of up to `longest`, and frames over the wire.

        Messages are recorded in `trace`.
        """
        self.envelopes, self.wire, self.short, self.trace = envelopes, wire, short, trace
        self.rank = envelopes.rank
        self.envelope_bytes = longest
        self._coders: dict[tuple[str, str, bool], list[Coder]] = {}
        self._number = 0

    def free_tag(self) -> int:
        """Return a tag for the frames of a message, from the upper half: the engine uses the lower."""
        self._number = (self._number + 1) % (self.wire.largest_tag // 2)
        return self.wire.largest_tag - self._number

    def coder(self, codec: Codec, device: Device, inline: bool) -> Coder:
        """Return a coder for exclusive use, so that a failing message does not affect others."""
        try:
            return self._coders.setdefault((codec.spec, device.name, inline), []).pop()
        except IndexError:
            return Coder(codec, device, inline=inline, annotate=gpu_range)

    def return_coder(self, coder: Coder, inline: bool) -> None:
        """Return a coder to the pool."""
        self._coders[coder.codec.spec, coder.stream.device.name, inline].append(coder)

    def close(self) -> None:
        """Close the coders' streams."""
        for coder in (coder for coders in self._coders.values() for coder in coders):
            coder.close()
        self._coders.clear()


class RecvOperation(MessageOperation):
    """A framed receive."""

    def __init__(
        self, channel: FrameChannel, blocks: Blocks, source: int, tag: int, arrival: Arrival | None = None
    ) -> None:
        """Post a receive, unless a message is passed that has arrived; it may be shorter than the blocks."""
        super().__init__(channel, blocks, writable=True)
        self._status, self._nbytes = MPI.Status(), 0
        self._receiving: deque[tuple[Transfer, Memory | None]] = deque()
        self._decoding: deque[tuple[Pending, Memory, tuple[int, int, int, int] | None]] = deque()
        """Chunks being decoded or copied: the operation, its source memory and its trace record."""
        try:
            self._posted = (
                channel.envelopes.receive(source, tag)
                if arrival is None
                else PostedRecv(channel.envelopes, source, tag, arrival)
            )
        except Exception:
            self._release(failed=True)
            raise
        self._steps = self._receive()

    def cancel(self) -> None:
        """Cancel the receive, unless it is matched."""
        self._posted.cancel()

    @property
    def is_cancelled(self) -> bool:
        """Return True if it was cancelled before a message matched it."""
        return self._status.Is_cancelled()

    def fill(self, status: MPI.Status) -> None:
        """Fill in source, tag and size of the message."""
        status.source, status.tag = self._status.source, self._status.tag
        status.Set_elements(MPI.BYTE, self._nbytes)
        status.Set_cancelled(self._status.Is_cancelled())

    @property
    def _title(self) -> str:
        return f"Recv from rank {self._status.source}, tag {self._status.tag}"

    @property
    def _where(self) -> str:
        return f"rank {self._channel.rank}: {self._title}"

    def _receive(self) -> Steps:
        yield partial(self._posted.completed, self._status)
        arrival = self._posted.arrival
        if arrival is None:  # cancelled
            return
        data = arrival.data
        if arrival.message is not None:
            yield from self._receive_long(arrival.message, arrival.nbytes)
        elif Announcement.begins(data):
            announced = Announcement.read(data, self._where)
            yield from self._receive_frames(announced) if announced.codec else self._receive_raw(announced)
        elif data.startswith(frame.MAGIC):
            self._receive_short(data)
        else:
            self._check_size(len(data))
            self._copy_in(data)
        if self._coder is not None:
            self._packed.unpack(self._coder.stream)
            end = self._coder.stream.record()
            yield end.done
            if self._pending_error is None:
                end.wait()
        if self._pending_error is not None:
            raise self._pending_error

    def _check(self, dtype: DType, nbytes: int) -> None:
        """Raise unless the message fits the buffer."""
        self._nbytes = nbytes
        own, most = self._blocks.buffer.dtype, self._blocks.counts[0]
        if nbytes and (dtype != own or nbytes > most * own.itemsize):
            raise self._unsuitable(f"{nbytes // dtype.itemsize} x {dtype}")

    def _check_size(self, nbytes: int) -> None:
        """Raise unless a message without frames, whose type is unknown, fits the buffer."""
        self._nbytes = nbytes
        if nbytes > self._blocks.counts[0] * self._blocks.buffer.dtype.itemsize:
            raise self._unsuitable(f"{nbytes} bytes")

    def _unsuitable(self, got: str) -> BufferSpecError:
        return BufferSpecError(
            self._title,
            expected=f"a message of at most {self._blocks.counts[0]} x {self._blocks.buffer.dtype}",
            got=got,
            remedy="Pass a receive buffer of the message's type that is at least as long.",
            rank=self._channel.rank,
        )

    def _copy_in(self, data: bytes) -> None:
        """Copy the bytes of a message into the buffer, from memory that the device reaches."""
        ctypes.memmove(self._envelope_memory.address, data, len(data))
        target = self._elements(get_codec("none"), inline=True)
        assert self._coder is not None
        self._coder.stream.copy(target.address, self._envelope_memory.address, len(data))

    def _receive_long(self, message: MPI.Message, nbytes: int) -> Steps:
        """Receive a long message that was sent without frames."""
        target, memory = None, None
        try:
            self._check_size(nbytes)
            target = self._elements(get_codec("none"), inline=False)
            yield self._coder_reached()
        except Exception as error:
            self._pending_error = error
        if target is None or self._coder is None or not self._coder.works_in_place:
            memory = self._device.pinned(nbytes)
        address = memory.address if memory is not None else target.address if target is not None else 0
        yield message.Irecv([MPI.memory.fromaddress(address, nbytes), MPI.BYTE]).Test
        if memory is not None:
            self._copy_out(memory, target, 0)
        yield self._all_decoded

    def _receive_short(self, data: bytes) -> None:
        header, payload = frame.parse(data, where=self._where), data[frame.HEADER_BYTES :]
        if len(payload) != header.decoded_bytes or header.with_checksum(zlib.adler32(payload)) != header:
            raise damaged_envelope(self._where)
        self._check(header.dtype, header.decoded_bytes)
        self._copy_in(payload)

    def _receive_frames(self, announced: Announcement) -> Steps:
        """Receive and decode frames; after an error keep receiving, since the sender waits for that."""
        target = None
        self._trace = self._channel.trace.begin("receive", f"receive, {announced.codec}, {announced.chunk_bytes}")
        try:
            self._check(announced.dtype, announced.nbytes)
            target = self._elements(get_codec(announced.codec), inline=announced.chunk_bytes < INLINE_BYTES)
        except Exception as error:
            self._pending_error = error
        size = announced.dtype.itemsize
        starts = range(0, announced.nbytes // size, announced.chunk_bytes // size)
        for chunk, start in enumerate(starts):
            yield partial(self._has_frame, announced, len(starts) - chunk)
            transfer, memory = self._receiving.popleft()
            assert memory is not None
            self._record(transfer, chunk)
            if self._is_error_notice(memory, transfer.nbytes, chunk):
                break
            to = target and target.slice(start, min(starts.step, starts.stop - start))
            self._decode(memory, transfer.nbytes, to, chunk)
        yield self._all_decoded

    def _receive_raw(self, announced: Announcement) -> Steps:
        """Receive raw chunks: in place if the wire can access the buffer; discard them if they do not fit."""
        target = None
        self._trace = self._channel.trace.begin("receive", f"receive, {announced.chunk_bytes}")
        try:
            self._check(announced.dtype, announced.nbytes)
            target = self._elements(get_codec("none"), inline=False)
            yield self._coder_reached()
        except Exception as error:
            self._pending_error = error
        size = announced.dtype.itemsize
        starts = range(0, announced.nbytes // size, announced.chunk_bytes // size)
        posted = 0
        for chunk in range(len(starts)):
            while posted < min(len(starts), chunk + (self._depth if target else DEPTH)):
                yield self._can_post
                self._post_raw(announced, target, posted)
                posted += 1
            yield self._receiving[0][0].done
            transfer, memory = self._receiving.popleft()
            self._record(transfer, chunk)
            if memory is not None:
                self._copy_out(memory, target, announced.chunk_bytes // size * chunk)
        yield self._all_decoded

    def _can_post(self) -> bool:
        """Return True if there is staging memory for another raw chunk."""
        self._all_decoded()
        return len(self._decoding) < DEPTH

    def _post_raw(self, announced: Announcement, target: Buffer | None, chunk: int) -> None:
        start = chunk * announced.chunk_bytes
        nbytes = min(announced.chunk_bytes, announced.nbytes - start)
        if target is not None and self._coder is not None and self._coder.works_in_place:
            address, memory = target.address + start, None
        else:
            memory = self._device.pinned(nbytes)
            address = memory.address
        receiving = self._channel.wire.receive(self._status.source, announced.tag, address, nbytes)
        self._receiving.append((receiving, memory))

    def _record(self, transfer: Transfer, chunk: int) -> None:
        self._trace.received(self._status.source, transfer.posted, 0, transfer.nbytes, 0, chunk, transfer.rail)

    def _copy_out(self, memory: Memory, target: Buffer | None, start: int) -> None:
        """Queue the copy of a chunk from pinned memory to its place."""
        if target is None or self._coder is None:
            memory.release()
            return
        elements = target.slice(start, memory.nbytes // target.dtype.itemsize)
        self._decoding.append((self._coder.place(memory, elements, "replace"), memory, None))

    def _has_frame(self, announced: Announcement, left: int) -> bool:
        """Post receives for the next of `left` frames; return True if the first has arrived."""
        self._all_decoded()
        while len(self._receiving) < min(AHEAD, left) and len(self._receiving) + len(self._decoding) < DEPTH:
            memory, peer = self._device.pinned(announced.room), self._status.source
            transfer = self._channel.wire.receive(peer, announced.tag, memory.address, announced.room)
            self._receiving.append((transfer, memory))
        return bool(self._receiving) and self._receiving[0][0].done()

    def _is_error_notice(self, memory: Memory, nbytes: int, chunk: int) -> bool:
        """Return True for an error notice in place of a frame; nothing follows it."""
        data = ctypes.string_at(memory.address, len(ERROR_NOTICE))
        if data != ERROR_NOTICE:
            return False
        text = ctypes.string_at(memory.address, nbytes)[len(ERROR_NOTICE) :].decode(errors="replace")
        self._pending_error = self._pending_error or PeerError(
            f"{self._title}, chunk {chunk}",
            expected="the sender to encode it",
            got=f"on rank {self._status.source} {text}",
            remedy="Fix the error on that rank; the communicator stays usable.",
            rank=self._channel.rank,
        )
        memory.release()
        while self._receiving:
            transfer, room = self._receiving.pop()
            transfer.cancel()
            if room is not None:
                room.release()
        return True

    def _decode(self, memory: Memory, nbytes: int, to: Buffer | None, chunk: int) -> None:
        """Queue the decoding of a frame, unless there was an error before."""
        if self._pending_error is None and to is not None and self._coder is not None:
            where, received = f"{self._where}, chunk {chunk}", memory.part(0, nbytes)
            try:
                header = self._coder.open(received, where)
                recorded = perf_counter_ns(), nbytes, to.nbytes, chunk
                pending = self._coder.decode(header, received, to, "replace", chunk, where)
                self._decoding.append((pending, memory, recorded))
                return
            except Exception as error:
                self._pending_error = error
        memory.release()

    def _all_decoded(self) -> bool:
        """Release decoded frames; return True if all are decoded."""
        while self._decoding and self._decoding[0][0].done():
            pending, memory, recorded = self._decoding.popleft()
            if recorded is not None:
                posted, nbytes, raw_bytes, chunk = recorded
                self._trace.coded(DECODE, posted, nbytes, raw_bytes, 0, chunk)
            try:
                pending.result()
            except Exception as error:
                self._pending_error = self._pending_error or error
            memory.release()
        return not self._decoding


class SendOperation(MessageOperation):
    """A framed send; its envelope is sent at once."""

    def __init__(self, channel: FrameChannel, blocks: Blocks, codec: Codec, peer: int, tag: int, chunk: int) -> None:
        """Send the elements to a peer, in chunks of `chunk` bytes."""
        super().__init__(channel, blocks, writable=False)
        self._peer = peer
        self._envelope: SentEnvelope | None = None
        self._sending: deque[tuple[Transfer, Memory | None]] = deque()
        size = blocks.buffer.dtype.itemsize
        nbytes = blocks.counts[0] * size
        raw = channel.envelopes.on_rails and codec.name == "none"
        chunk_elements = max(1, min(RAW_BYTES if raw else chunk, nbytes) // size)
        short = nbytes <= channel.short
        try:
            self._source = self._elements(
                get_codec("none") if short else codec, inline=short or chunk_elements * size < INLINE_BYTES
            )
            written = self._write_short() if short else self._announce(codec, chunk_elements, raw)
            self._envelope = channel.envelopes.send(self._envelope_memory.address, written, peer, tag)
        except Exception:
            self._release(failed=True)
            raise
        starts = range(0, 0 if short else self._source.count, chunk_elements)
        self._steps = self._send_raw(starts) if raw else self._send(starts)

    def _envelope_in_use(self) -> bool:
        return self._envelope is not None and self._envelope.holds

    def _write_short(self) -> int:
        """Write the whole message into the envelope, as a raw frame."""
        assert self._coder is not None
        source, address = self._source, self._envelope_memory.address
        self._coder.stream.copy(address + frame.HEADER_BYTES, source.address, source.nbytes)
        self._coder.stream.synchronize()
        payload = zlib.adler32(ctypes.string_at(address + frame.HEADER_BYTES, source.nbytes))
        header = frame.FrameHeader(0, source.dtype, 0, source.nbytes, source.nbytes, raw=True).with_checksum(payload)
        ctypes.memmove(address, header.pack(), frame.HEADER_BYTES)
        return frame.HEADER_BYTES + source.nbytes

    def _announce(self, codec: Codec, chunk_elements: int, raw: bool = False) -> int:
        """Write an announcement into the envelope."""
        dtype, nbytes = self._source.dtype, self._source.nbytes
        self._trace = self._channel.trace.begin("send", f"send, {codec.spec}, {chunk_elements}")
        raw_bytes = chunk_elements * dtype.itemsize
        self._room = raw_bytes if raw else max(MIN_FRAME_BYTES, frame.max_frame_bytes(codec, chunk_elements, dtype))
        self._tag = self._channel.free_tag()
        spec = "" if raw else codec.spec
        data = Announcement(dtype, nbytes, raw_bytes, self._room, self._tag, spec).pack()
        ctypes.memmove(self._envelope_memory.address, data, len(data))
        return len(data)

    def _send(self, starts: range) -> Steps:
        assert self._coder is not None
        for chunk, start in enumerate(starts):
            yield self._can_send
            memory = self._coder.memory(self._room)
            elements = self._source.slice(start, min(starts.step, self._source.count - start))
            posted = perf_counter_ns()
            try:
                nbytes = yield from self._coder.encode(elements, memory, chunk)
                self._trace.coded(ENCODE, posted, nbytes, elements.nbytes, 0, chunk)
            except Exception as error:
                self._pending_error = error
                nbytes = _write_error_notice(error, memory)
            transfer = self._channel.wire.send(self._peer, self._tag, memory.address, nbytes)
            self._sending.append((transfer, memory))
            if self._pending_error is not None:
                break
        yield self._all_sent
        self._packed.unpack(self._coder.stream)
        if self._pending_error is not None:
            raise self._pending_error

    def _send_raw(self, starts: range) -> Steps:
        """Send raw chunks, in place if the wire can access the buffer."""
        assert self._coder is not None
        yield self._coder_reached()
        for start in starts:
            yield partial(self._can_send, self._depth)
            elements = self._source.slice(start, min(starts.step, self._source.count - start))
            address, memory = elements.address, None
            if not self._coder.works_in_place:
                memory = self._coder.memory(elements.nbytes)
                yield from self._coder.copy(elements, memory)
                address = memory.address
            sending = self._channel.wire.send(self._peer, self._tag, address, elements.nbytes)
            self._sending.append((sending, memory))
        yield self._all_sent
        self._packed.unpack(self._coder.stream)

    def _can_send(self, depth: int = DEPTH) -> bool:
        """Release chunks that were sent; return True if another may be posted."""
        while self._sending and self._sending[0][0].done():
            transfer, memory = self._sending.popleft()
            self._trace.sent(self._peer, transfer.posted, transfer.nbytes, 0, 0, transfer.rail)
            if memory is not None:
                memory.release()
        return len(self._sending) < depth

    def _all_sent(self) -> bool:
        return self._can_send() and not self._sending and self._envelope is not None and self._envelope.completed()


def _write_error_notice(error: Exception, memory: Memory) -> int:
    note = (ERROR_NOTICE + f"{type(error).__name__}: {error}".encode())[:MIN_FRAME_BYTES]
    ctypes.memmove(memory.address, note, len(note))
    return len(note)


MAX_SHORT_BYTES = 1 << 15
"""The longest message sent within an envelope: every posted receive has memory for it."""
OBJECT_BYTES = 1 << 15
"""The longest pickle that irecv receives without a buffer, as in mpi4py."""
MPI4PY_CODES = frozenset("?bBhHiIlLqQfdFD")
"""Numpy type codes that every mpi4py knows."""


class PointToPoint:
    """The point-to-point messages of one communicator."""

    def __init__(self, comm: MPI.Intracomm, runtime: Runtime, settings: Settings) -> None:
        """Pass messages without a codec through on `comm`: collective."""
        self._comm, self._runtime, self._chunk = comm, runtime, settings.chunk or DEFAULT_CHUNK
        self._engine, self._driver = runtime.engine, runtime.driver
        codec = get_codec(settings.codec)
        on_rails = bool(settings.rails)
        self._rail_codec = get_codec("none") if on_rails else None
        """The codec of messages without one; None to pass them through."""
        self._codec = self._rail_codec if codec.name in ("none", "auto") else codec
        short = min(MAX_SHORT_BYTES, settings.passthrough_bytes)
        longest = max(MIN_FRAME_BYTES, frame.HEADER_BYTES + short)
        self.mixed = None
        """The communicator of mpi4py's other calls, if they share that of the frames; None if not."""
        envelopes: EnvelopeChannel
        if on_rails:
            envelopes = RailEnvelopes(runtime.wire, runtime.engine, longest)
        else:
            envelopes = MpiEnvelopes(comm, longest)
            self.mixed = envelopes.comm if self._codec is not None else None
        self._channel = FrameChannel(envelopes, runtime.wire, short, longest, runtime.engine.trace)

    def close(self, *, broken: bool) -> None:
        """Close the streams and free the duplicate: collective, unless the communicator is `broken`."""
        self._channel.close()
        if not broken:
            self._channel.envelopes.close()

    def send(
        self, buf: Any, dest: int, tag: int, codec: str | Codec | None, chunk: int | None, stream: Any = None
    ) -> None:
        """Send a message; return when the buffer may be reused."""
        framed = self._framed(codec, dest)
        if framed is None:
            self._block("Send", buf, (dest, tag), stream)
        else:
            self._begin_send(buf, dest, tag, framed, stream, explicit=codec is not None, chunk=chunk).Wait()

    def receive(
        self,
        buf: Any,
        source: int,
        tag: int,
        status: MPI.Status | None,
        codec: str | Codec | None,
        stream: Any = None,
    ) -> None:
        """Receive a message."""
        if self._framed(codec, source) is None:
            self._block("Recv", buf, (source, tag), stream, status)
        else:
            self._begin_receive(buf, source, tag, stream).Wait(status)

    def start_send(
        self, buf: Any, dest: int, tag: int, codec: str | Codec | None, chunk: int | None, stream: Any = None
    ) -> Request:
        """Start a send."""
        framed = self._framed(codec, dest)
        if framed is None:
            return self._begin("Isend", buf, (dest, tag), stream)
        return self._woken(self._begin_send(buf, dest, tag, framed, stream, explicit=codec is not None, chunk=chunk))

    def start_receive(self, buf: Any, source: int, tag: int, codec: str | Codec | None, stream: Any = None) -> Request:
        """Start a receive."""
        if self._framed(codec, source) is None:
            return self._begin("Irecv", buf, (source, tag), stream)
        return self._woken(self._begin_receive(buf, source, tag, stream))

    def exchange(
        self,
        out: tuple[Any, int, int],
        back: tuple[Any, int, int],
        status: MPI.Status | None,
        codec: str | Codec | None,
        chunk: int | None,
        stream: Any = None,
    ) -> None:
        """Send a message and receive another, each given as buffer, peer and tag."""
        if self._framed(codec, 0) is None and self._may_block_in_mpi4py(out[0]) and self._may_block_in_mpi4py(back[0]):
            self._comm.Sendrecv(*out, *back, *(() if status is None else (status,)))
            return
        sent, received = self.start_send(*out, codec, chunk, stream), self.start_receive(*back, codec, stream)
        try:
            received.Wait(status)
        finally:
            sent.Wait()

    # Matched probes

    def probe(self, source: int, tag: int, status: MPI.Status | None) -> bool:
        """Return True if there is a message to receive; fill in its source, tag and size."""
        arrival = self._arrived(source, tag)
        if arrival is None:
            return self._comm.Iprobe(source, tag, status)
        _describe(arrival, status)
        return True

    def matched_probe(
        self, source: int, tag: int, status: MPI.Status | None, *, pickled: bool = False
    ) -> MPI.Message | MatchedMessage | None:
        """Take a message that has arrived out of the matching; None if there is none.

        mpi4py's messages must know whether an object is in them.
        """
        arrival = self._arrived(source, tag)
        if arrival is None:
            return (self._comm.improbe if pickled else self._comm.Improbe)(source, tag, status)
        self._channel.envelopes.take(arrival)
        _describe(arrival, status)
        return MatchedMessage(self, arrival)

    def wait_for(self, found: Callable[[], Any]) -> Any:
        """Repeat a probe until it has found something."""
        results: list[Any] = []

        def ready() -> bool:
            results[:] = [found()]
            return bool(results[0])

        self._driver.wait_until(ready)
        return results[0]

    def _arrived(self, source: int, tag: int) -> Arrival | None:
        """Return the oldest message on the channel of the frames."""
        if source == MPI.PROC_NULL:
            return None
        if self._engine.broken is not None:
            raise self._engine.broken
        self._driver.poll()
        arrival = self._channel.envelopes.peek(source, tag)
        return arrival if arrival is not None and arrival.done() else None

    def start_object(self, buf: Any, source: int, tag: int) -> ObjectRequest:
        """Start to receive a pickled object; `buf` is a buffer, its size or None."""
        room = bytearray(OBJECT_BYTES if buf is None else buf) if buf is None or isinstance(buf, int) else buf
        request = self._begin_receive(room, source, tag, None)
        self._woken(request)
        return ObjectRequest(request, room)

    def begin_matched(self, buf: Any, arrival: Arrival) -> P2PRequest:
        """Start to receive a message that was matched."""
        blocks = self._blocks("Recv", buf, None, writable=True)
        return self._track(RecvOperation(self._channel, blocks, arrival.source, arrival.tag, arrival))

    # Framed messages

    def _framed(self, codec: str | Codec | None, peer: int) -> Codec | None:
        """Return the codec of a message; None to pass it through."""
        if peer == MPI.PROC_NULL:
            return None
        if codec is None:
            return self._codec
        found = get_codec(codec)
        return self._rail_codec if found.name == "none" else found

    def _begin_send(
        self, buf: Any, dest: int, tag: int, codec: Codec, stream: Any, *, explicit: bool, chunk: int | None
    ) -> P2PRequest:
        if chunk is not None:
            check_options("Send", {"chunk": chunk}, self._comm.rank)
        blocks = self._blocks("Send", buf, stream, writable=False)
        dtype = blocks.buffer.dtype
        if explicit:
            codec.check_dtype(dtype)
        elif dtype.name not in codec.dtypes:
            codec = get_codec("none")
        return self._track(SendOperation(self._channel, blocks, codec, dest, tag, chunk or self._chunk))

    def _begin_receive(self, buf: Any, source: int, tag: int, stream: Any) -> P2PRequest:
        blocks = self._blocks("Recv", buf, stream, writable=True)
        return self._track(RecvOperation(self._channel, blocks, source, tag))

    def _blocks(self, method: str, buf: Any, stream: Any, *, writable: bool) -> Blocks:
        """Parse a buffer argument."""
        if self._engine.broken is not None:
            raise self._engine.broken
        topic, rank = f"{method}, {'receive' if writable else 'send'} buffer", self._comm.rank
        try:
            return read_blocks(buf, writable=writable, topic=topic, rank=rank, stream=self._handle(method, stream))
        except UnsupportedError as reason:
            raise BufferSpecError(
                topic,
                expected="elements that can be encoded",
                got=str(reason),
                remedy="Convert them first: rails carry basic types only."
                if self._rail_codec is not None
                else "Pass codec='none' here and on the other side.",
                rank=rank,
            ) from None

    def _handle(self, method: str, stream: Any) -> int | None:
        """Return the handle of the stream that a call names, if any."""
        if stream is not None:
            check_options(method, {"stream": stream}, self._comm.rank)
        return stream_handle(stream)

    def _track(self, message: SendOperation | RecvOperation) -> P2PRequest:
        with self._driver.lock:
            self._engine.p2p_operations.append(message)
        return P2PRequest(message, self._runtime)

    def _woken(self, request: P2PRequest) -> P2PRequest:
        """Start a message and wake the progress thread, which goes on with it."""
        self._driver.poll()
        self._driver.wake()
        return request

    # Passed-through messages

    def _block(
        self, method: str, buf: Any, rest: tuple[int, int], stream: Any, status: MPI.Status | None = None
    ) -> None:
        """Make a blocking native call; without a progress thread, drive the engine meanwhile."""
        if self._may_block_in_mpi4py(buf):
            try:
                getattr(self._comm, method)(buf, *rest, *(() if status is None else (status,)))
            except MPI.Exception as error:
                self._runtime.native.check_dead(error)
                raise
            return
        request = self._begin(f"I{method.lower()}", buf, rest, stream)
        self._driver.wait_until(lambda: request.Test(status))

    def _may_block_in_mpi4py(self, buf: Any) -> bool:
        """Return True if mpi4py takes the buffer, and the call may block."""
        return (self._driver.background or self._engine.idle) and _mpi4py_accepts_buffer(buf)

    def _begin(self, method: str, buf: Any, rest: tuple[int, int], stream: Any) -> Request:
        """Start a native call, staged through the host where mpi4py cannot access the elements."""
        staging = None if _mpi4py_accepts_buffer(buf) else self._stage(method, buf, stream)
        staged = staging.args[0] if staging else buf
        request = NativeRequest(self._driver, (buf, staged), staging, title=method)
        request.issued(getattr(self._comm, method)(staged, *rest))
        self._runtime.in_flight.keep(request)
        return request

    def _stage(self, method: str, buf: Any, stream: Any) -> HostStaging | None:
        receives, rank, reaches_gpu = method == "Irecv", self._comm.rank, cuda_aware().aware
        try:
            blocks = read_blocks(buf, writable=receives, topic=method, rank=rank, stream=self._handle(method, stream))
        except UnsupportedError:
            wait_for_producers(method, (buf,), reaches_gpu=reaches_gpu, rank=rank)
            return None
        # HostStaging copies the one buffer of a Bcast back, which is what a receive needs.
        call = (
            Call("Bcast", (buf, None), {}, True, received=blocks)
            if receives
            else Call(method, (buf, None), {}, True, sent=blocks)
        )
        return None if mpi4py_accepts(call) else HostStaging(call, reaches_gpu=reaches_gpu)


def copy_of(buf: Any) -> Any:
    """Return a copy of a buffer argument, with its elements in the same order."""
    if isinstance(buf, (list, tuple)):
        return [copy_of(buf[0]), *buf[1:]]
    if isinstance(buf, memoryview):
        return bytes(buf)
    return buf.clone() if hasattr(buf, "clone") else copy(buf)


def _describe(arrival: Arrival, status: MPI.Status | None) -> None:
    """Fill in source, tag and size of a message."""
    if status is not None:
        status.source, status.tag = arrival.source, arrival.tag
        status.Set_elements(MPI.BYTE, message_bytes(arrival))
        status.Set_cancelled(False)


def message_bytes(arrival: Arrival) -> int:
    """Return the size of a message, without envelope and frames."""
    where = f"message from rank {arrival.source}, tag {arrival.tag}"
    if arrival.message is None and Announcement.begins(arrival.data):
        return Announcement.read(arrival.data, where).nbytes
    if arrival.message is None and arrival.data.startswith(frame.MAGIC):
        return frame.parse(arrival.data, where=where).decoded_bytes
    return arrival.nbytes


class MatchedMessage:
    """A message that a matched probe has taken: mpi4py's MPI.Message for messages in frames."""

    def __init__(self, p2p: PointToPoint, arrival: Arrival) -> None:
        """Take a message that is matched no more."""
        self._p2p, self._arrival = p2p, arrival

    def Recv(self, buf: Any, status: MPI.Status | None = None) -> None:
        """Receive it."""
        self.Irecv(buf).Wait(status)

    def Irecv(self, buf: Any) -> P2PRequest:
        """Start to receive it."""
        return self._p2p.begin_matched(buf, self._arrival)

    def recv(self, status: MPI.Status | None = None) -> Any:
        """Receive it as a pickled object."""
        room = bytearray(message_bytes(self._arrival))
        self.Recv(room, status)
        return MPI.pickle.loads(room)


class P2PRequest(Request):
    """The request of a framed message."""

    def __init__(self, message: SendOperation | RecvOperation, runtime: Runtime) -> None:
        """Wait by driving the engine."""
        self._message, self._engine, self._driver = message, runtime.engine, runtime.driver

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait until it has completed; raise its error."""
        self._driver.wait_until(self._has_ended)
        return self._end(status)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return True if it has completed; raise its error."""
        if not self._has_ended():
            self._driver.poll()
        return self._has_ended() and self._end(status)

    def Cancel(self) -> None:
        """Cancel a receive, unless it is matched; the status of Wait tells."""
        if isinstance(self._message, RecvOperation):
            with self._driver.lock:
                self._message.cancel()

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Return True if it has completed, and leave it active; fill in the status of a receive."""
        if not self._has_ended():
            self._driver.poll()
        if status is not None and self._message.done and isinstance(self._message, RecvOperation):
            self._message.fill(status)
        return self._has_ended()

    def _has_ended(self) -> bool:
        return self._message.done or self._engine.broken is not None

    def _end(self, status: MPI.Status | None) -> bool:
        message, self._inactive = self._message, True
        if status is not None and message.done and isinstance(message, RecvOperation):
            message.fill(status)
        error = message.error if message.done else self._engine.broken
        if error is not None:
            raise error
        return True


class ObjectRequest(P2PRequest):
    """The request of a pickled object."""

    def __init__(self, request: P2PRequest, room: Any) -> None:
        """Take over the request of its bytes."""
        self._message, self._engine, self._driver = request._message, request._engine, request._driver
        self._room = room

    def wait(self, status: MPI.Status | None = None) -> Any:
        """Wait until it has completed, and return the object; raise its error."""
        status = status or MPI.Status()
        self.Wait(status)
        return None if status.Is_cancelled() else MPI.pickle.loads(memoryview(self._room)[: status.count])

    def test(self, status: MPI.Status | None = None) -> tuple[bool, Any]:
        """Return True and the object if it has completed; raise its error."""
        return (True, self.wait(status)) if self.Test() else (False, None)


def _mpi4py_accepts_buffer(buf: Any) -> bool:
    """Return True if mpi4py surely takes a buffer as it is; decided in a microsecond."""
    if type(buf) is np.ndarray:
        return buf.flags.forc and buf.dtype.char in MPI4PY_CODES
    data = buf[0] if isinstance(buf, (list, tuple)) and buf else buf
    if type(data) is np.ndarray:
        return bool(data.flags.forc) and isinstance(buf[-1], (MPI.Datatype, str))
    return data is None or isinstance(data, (bytes, bytearray, memoryview, type(MPI.BOTTOM)))
