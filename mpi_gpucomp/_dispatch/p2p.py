"""Messages from rank to rank under mpi4py's names: compressed, pipelined, or MPI's own.

With no codec a call is mpi4py's, unchanged. With one, messages travel in frames on a communicator of their own, and
whoever receives must say so too: by the communicator's codec, or by `codec=` on the call. Which codec it is, and in
chunks of what size, the sender alone decides. What mpi4py offers beside these calls (Ssend, Bsend, Probe, send, ...)
knows nothing of frames, and finds only messages without a codec.

A communicator whose codec is "auto" leaves messages to MPI: two ranks that have not talked cannot agree that frames pay
off, and Probe goes on to find everything. `codec="auto"` on both calls takes frames.

On rails no message is MPI's own: without a codec its chunks travel as they are.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections import deque
from contextlib import suppress
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpi_gpucomp._call import buffers as specs
from mpi_gpucomp._call.calls import Form
from mpi_gpucomp._call.staging import Detour, Packing, device_of, passes
from mpi_gpucomp._dispatch.envelopes import LetterFirsts, MpiFirsts
from mpi_gpucomp._tuning.model import DEFAULT_CHUNK
from mpi_gpucomp.codec import frame, get_codec
from mpi_gpucomp.device import order_after
from mpi_gpucomp.device.base import dtype_of_code
from mpi_gpucomp.engine.coder import INLINE_BYTES, Coder
from mpi_gpucomp.engine.lane_io import AHEAD
from mpi_gpucomp.errors import BufferSpecError, FrameError, PeerError
from mpi_gpucomp.monitor.nvtx import gpu_range
from mpi_gpucomp.request import PlainRequest, Request
from mpi_gpucomp.trace import DECODE, ENCODE, NO_CALL_TRACE, NO_TRACE

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from mpi_gpucomp._dispatch.envelopes import First
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.device import Buffer
    from mpi_gpucomp.engine.layout import Blocks

    Ready = Callable[[], bool]
    Moves = Generator[Ready, None, None]
    from mpi_gpucomp._dispatch.dispatcher import Caller
    from mpi_gpucomp._dispatch.envelopes import Firsts
    from mpi_gpucomp._dispatch.plan import Settings
    from mpi_gpucomp.codec import Pending
    from mpi_gpucomp.device import Device, DType, Memory
    from mpi_gpucomp.trace import CallTrace, Trace
    from mpi_gpucomp.transport.base import Transfer, Transport

__all__ = [
    "DEPTH",
    "LEAST_ROOM",
    "NOTE",
    "RAW_BYTES",
    "RAW_DEPTH",
    "Announcement",
    "Incoming",
    "Line",
    "Message",
    "MessageRequest",
    "Outgoing",
    "PointToPoint",
    "damaged",
]


# A message from rank to rank that is under way, whichever side it is seen from.
#
# The first part travels under the caller's tag, so that MPI itself matches messages and keeps their order. A short
# message is there as a whole, in a raw frame. Otherwise the first part announces frames that follow under a tag of the
# sender's choice, DEPTH of them at a time whatever the message's length: one is encoded while another is on the
# wire, and
# decoded beside the wire. A sender that fails in between sends a note in a frame's place.
#
# On rails a message without a codec travels in chunks with no frames around them (`raw`): out of the sender's own
# memory
# and into the receiver's, where the wire reaches it, and by way of pinned memory where it does not.

DEPTH = 3
"""Frames of a message that a rank has memory for at a time."""
RAW_BYTES, RAW_DEPTH = 1 << 22, 8
"""Chunks without frames: how long, and how many are on their way at a time where they need no memory."""
NOTE = b"GPCE"
"""What a note begins with."""


class Message:
    """A message under way: an errand of the engine's, whose generator yields what it waits for."""

    def __init__(self, line: Line, blocks: Blocks, *, writable: bool) -> None:
        """Have memory for the first part; whoever sends it or listens for it says how to go on in `_moves`."""
        self.done = False
        self.error: Exception | None = None
        self._line, self._blocks, self._writable = line, blocks, writable
        self._device = device_of(blocks)
        self._packing = Packing(self._device)
        self._first = self._device.pinned(line.first_bytes)
        self._first_part: First | None = None
        self._coder: Coder | None = None
        self._call_trace: CallTrace = NO_CALL_TRACE
        self._inline = True
        self._fault: Exception | None = None
        """What went wrong, to be raised once nothing of the message is on its way any more."""
        self._ready: Ready = lambda: True
        self._moves: Moves

    def move(self) -> bool:
        """Go on as far as possible without waiting; say whether anything has moved."""
        moved = False
        try:
            while not self.done and self._step():
                moved = True
        except Exception:
            self._let_go(failed=True)
            raise
        return moved

    def _step(self) -> bool:
        """Go on to where the message waits next, if what it waits for is there."""
        try:
            try:
                if not self._ready():
                    return False
            except Exception as error:
                self._ready = self._moves.throw(error)
            else:
                self._ready = next(self._moves)
        except StopIteration:
            self._let_go(failed=False)
            self.done = True
        return True

    def _elements(self, codec: Codec, *, inline: bool) -> Buffer:
        """Take a coder, and return the caller's elements where it can work on them."""
        self._inline = inline
        self._coder = coder = self._line.coder(codec, self._device, inline)
        order_after(self._blocks.buffer, coder.stream)
        near = self._packing.via(self._blocks, writable=self._writable)
        assert near is not None
        self._packing.fill(coder.stream)
        return near.buffer.slice(near.starts[0], near.counts[0])

    def _has_come_to(self) -> Ready:
        """Return what says whether the coder is through with what was queued so far."""
        assert self._coder is not None
        return self._coder.stream.record().done

    @property
    def _depth(self) -> int:
        """Return how many raw chunks may be on their way."""
        assert self._coder is not None
        return RAW_DEPTH if self._coder.works_in_place else DEPTH

    def _let_go(self, *, failed: bool) -> None:
        """Give back what the message has used, unless MPI still has it."""
        self._call_trace.end(failed=failed)
        if self._first_part is None or not self._first_part.holds:
            self._first.release()
        coder, self._coder = self._coder, None
        if coder is not None and failed:
            with suppress(Exception):  # one has been raised already
                coder.close()
        elif coder is not None:
            self._line.give_back(coder, self._inline)


# What messages from rank to rank go over, and how the first part of one announces the rest.

LEAST_ROOM = 1024
"""Bytes that there is room for in every part of a message: an announcement or a note, however small the frames are."""
MAGIC, LAYOUT = b"GPCA", struct.Struct("<4sIBQQQI")


class Announcement(NamedTuple):
    """What a sender says of the frames that follow."""

    dtype: DType
    nbytes: int
    """Bytes of the message."""
    piece: int
    """Bytes of a chunk; the last one may be shorter."""
    room: int
    """Bytes that no frame exceeds."""
    tag: int
    """What the frames travel under."""
    codec: str
    """Empty where chunks travel as they are, without frames."""

    def pack(self) -> bytes:
        """Return its bytes, with a checksum of all the others behind the magic ones."""
        numbers = self.dtype.code, self.nbytes, self.piece, self.room, self.tag
        body = LAYOUT.pack(MAGIC, 0, *numbers) + self.codec.encode()
        assert len(body) <= LEAST_ROOM, f"the spec of the codec is too long: {self.codec}"
        return body[:4] + struct.pack("<I", zlib.adler32(body)) + body[8:]

    @staticmethod
    def begins(data: bytes) -> bool:
        """Say whether the first part of a message is an announcement."""
        return data.startswith(MAGIC)

    @classmethod
    def read(cls, data: bytes, where: str) -> Announcement:
        """Read what `pack` has made; `where` names the message in errors."""
        body = data[:4] + bytes(4) + data[8:]
        if len(data) < LAYOUT.size or struct.pack("<I", zlib.adler32(body)) != data[4:8]:
            raise damaged(where)
        _, _, code, nbytes, piece, room, tag = LAYOUT.unpack_from(data)
        dtype = dtype_of_code(code)
        assert dtype is not None, "the checksum is right"
        return cls(dtype, nbytes, piece, room, tag, data[LAYOUT.size :].decode())


def damaged(where: str) -> FrameError:
    """Make the error for a first part that is not as it was sent."""
    return FrameError(
        where,
        expected="a first part with the right checksum",
        got="another one",
        remedy="The message was damaged or cut short on its way, or something else wrote to this buffer.",
    )


class Line:
    """What the messages of one communicator go over, and the coders that they take turns to use."""

    def __init__(self, firsts: Firsts, transport: Transport, short: int, trace: Trace = NO_TRACE) -> None:
        """Send first parts by `firsts`, with whole messages of up to `short` bytes, and frames over the transport.

        Messages are recorded in a `trace`.
        """
        self.firsts, self.transport, self.short, self.trace = firsts, transport, short, trace
        self.rank = firsts.rank
        self.first_bytes = max(LEAST_ROOM, frame.HEADER_BYTES + short)
        self._coders: dict[tuple[str, str, bool], list[Coder]] = {}
        self._number = 0

    def free_tag(self) -> int:
        """Return a tag for the frames of a message, from the upper half of all tags: the engine begins below."""
        self._number = (self._number + 1) % (self.transport.largest_tag // 2)
        return self.transport.largest_tag - self._number

    def coder(self, codec: Codec, device: Device, inline: bool) -> Coder:
        """Return a coder that no other message uses, so that one which fails takes no other with it."""
        try:
            return self._coders.setdefault((codec.spec, device.name, inline), []).pop()
        except IndexError:
            return Coder(codec, device, inline=inline, annotate=gpu_range)

    def give_back(self, coder: Coder, inline: bool) -> None:
        """Keep a coder for other messages."""
        self._coders[coder.codec.spec, coder.stream.device.name, inline].append(coder)

    def close(self) -> None:
        """End the streams."""
        for coder in (coder for coders in self._coders.values() for coder in coders):
            coder.close()
        self._coders.clear()


# A message as its receiver sees it: the first part says what it is, and whether frames follow.


class Incoming(Message):
    """A message that is received."""

    def __init__(self, line: Line, blocks: Blocks, source: int, tag: int) -> None:
        """Have room for at most so many elements, from a peer and with a tag, or from any."""
        super().__init__(line, blocks, writable=True)
        self._status, self._nbytes = MPI.Status(), 0
        self._arriving: deque[tuple[Transfer, Memory | None]] = deque()
        self._working: deque[tuple[Pending, Memory, tuple[int, int, int, int] | None]] = deque()
        """What is being decoded or copied, from where, and what is recorded of it."""
        try:
            self._first_part = line.firsts.receive(self._first.address, line.first_bytes, source, tag)
        except Exception:
            self._let_go(failed=True)
            raise
        self._moves = self._receive()

    def cancel(self) -> None:
        """Take the receive back, unless a message is there for it."""
        if self._first_part is not None:
            self._first_part.cancel()

    def fill(self, status: MPI.Status) -> None:
        """Say who has sent the message, with which tag, and how long it is."""
        status.source, status.tag = self._status.source, self._status.tag
        status.Set_elements(MPI.BYTE, self._nbytes)
        status.Set_cancelled(self._status.Is_cancelled())

    @property
    def _title(self) -> str:
        return f"Recv from rank {self._status.source}, tag {self._status.tag}"

    @property
    def _where(self) -> str:
        return f"rank {self._line.rank}: {self._title}"

    def _receive(self) -> Moves:
        assert self._first_part is not None
        yield partial(self._first_part.over, self._status)
        if self._status.Is_cancelled():
            return
        data = ctypes.string_at(self._first.address, self._status.count)
        if Announcement.begins(data):
            announced = Announcement.read(data, self._where)
            yield from self._take_frames(announced) if announced.codec else self._take_raw(announced)
        else:
            self._take_whole(data)
        if self._coder is not None:
            self._packing.empty(self._coder.stream)
            end = self._coder.stream.record()
            yield end.done
            if self._fault is None:
                end.wait()
        if self._fault is not None:
            raise self._fault

    def _check(self, dtype: DType, nbytes: int) -> None:
        """Raise unless the message fits the buffer."""
        self._nbytes = nbytes
        own, most = self._blocks.buffer.dtype, self._blocks.counts[0]
        if nbytes and (dtype != own or nbytes > most * own.itemsize):
            raise BufferSpecError(
                self._title,
                expected=f"a message of at most {most} x {own}",
                got=f"{nbytes // dtype.itemsize} x {dtype}",
                remedy="Pass a receive buffer of the message's type that is at least as long.",
                rank=self._line.rank,
            )

    def _take_whole(self, data: bytes) -> None:
        header, payload = frame.parse(data, where=self._where), data[frame.HEADER_BYTES :]
        if len(payload) != header.decoded_bytes or header.with_checksum(zlib.adler32(payload)) != header:
            raise damaged(self._where)
        self._check(header.dtype, header.decoded_bytes)
        target = self._elements(get_codec("none"), inline=True)
        assert self._coder is not None
        self._coder.stream.copy(target.address, self._first.address + frame.HEADER_BYTES, header.decoded_bytes)

    def _take_frames(self, announced: Announcement) -> Moves:
        """Receive frames and decode them; if that goes wrong receive them all the same, as their sender waits."""
        target = None
        self._call_trace = self._line.trace.begin("receive", f"receive, {announced.codec}, {announced.piece}")
        try:
            self._check(announced.dtype, announced.nbytes)
            target = self._elements(get_codec(announced.codec), inline=announced.piece < INLINE_BYTES)
        except Exception as error:
            self._fault = error
        size = announced.dtype.itemsize
        starts = range(0, announced.nbytes // size, announced.piece // size)
        for chunk, start in enumerate(starts):
            yield partial(self._has_frame, announced, len(starts) - chunk)
            transfer, memory = self._arriving.popleft()
            assert memory is not None
            self._record(transfer, chunk)
            if self._is_note(memory, transfer.nbytes, chunk):
                break
            to = target and target.slice(start, min(starts.step, starts.stop - start))
            self._decode(memory, transfer.nbytes, to, chunk)
        yield self._has_decoded

    def _take_raw(self, announced: Announcement) -> Moves:
        """Receive chunks as they are: where they belong, if the wire reaches it; if they do not fit, for nobody."""
        target = None
        self._call_trace = self._line.trace.begin("receive", f"receive, {announced.piece}")
        try:
            self._check(announced.dtype, announced.nbytes)
            target = self._elements(get_codec("none"), inline=False)
            yield self._has_come_to()
        except Exception as error:
            self._fault = error
        size = announced.dtype.itemsize
        starts = range(0, announced.nbytes // size, announced.piece // size)
        asked = 0
        for chunk in range(len(starts)):
            while asked < min(len(starts), chunk + (self._depth if target else DEPTH)):
                yield self._has_space
                self._ask_raw(announced, target, asked)
                asked += 1
            yield self._arriving[0][0].done
            transfer, memory = self._arriving.popleft()
            self._record(transfer, chunk)
            if memory is not None:
                self._place(memory, target, announced.piece // size * chunk)
        yield self._has_decoded

    def _has_space(self) -> bool:
        """Say whether there may be memory for another raw chunk, if it needs any."""
        self._has_decoded()
        return len(self._working) < DEPTH

    def _ask_raw(self, announced: Announcement, target: Buffer | None, chunk: int) -> None:
        start = chunk * announced.piece
        nbytes = min(announced.piece, announced.nbytes - start)
        if target is not None and self._coder is not None and self._coder.works_in_place:
            address, memory = target.address + start, None
        else:
            memory = self._device.pinned(nbytes)
            address = memory.address
        receiving = self._line.transport.receive(self._status.source, announced.tag, address, nbytes)
        receiving.posted = perf_counter_ns()
        self._arriving.append((receiving, memory))

    def _record(self, transfer: Transfer, chunk: int) -> None:
        self._call_trace.received(self._status.source, transfer.posted, 0, transfer.nbytes, 0, chunk, transfer.rail)

    def _place(self, memory: Memory, target: Buffer | None, start: int) -> None:
        """Queue what has arrived in pinned memory to be copied to where it belongs."""
        if target is None or self._coder is None:
            memory.release()
            return
        elements = target.slice(start, memory.nbytes // target.dtype.itemsize)
        self._working.append((self._coder.place(memory, elements, "replace"), memory, None))

    def _has_frame(self, announced: Announcement, left: int) -> bool:
        """Have room for the next frames, of which so many are left; say whether the first of them is there."""
        self._has_decoded()
        while len(self._arriving) < min(AHEAD, left) and len(self._arriving) + len(self._working) < DEPTH:
            memory, peer = self._device.pinned(announced.room), self._status.source
            transfer = self._line.transport.receive(peer, announced.tag, memory.address, announced.room)
            transfer.posted = perf_counter_ns()
            self._arriving.append((transfer, memory))
        return bool(self._arriving) and self._arriving[0][0].done()

    def _is_note(self, memory: Memory, nbytes: int, chunk: int) -> bool:
        """Say whether a note has come in a frame's place; nothing comes behind it."""
        data = ctypes.string_at(memory.address, len(NOTE))
        if data != NOTE:
            return False
        text = ctypes.string_at(memory.address, nbytes)[len(NOTE) :].decode(errors="replace")
        self._fault = self._fault or PeerError(
            f"{self._title}, chunk {chunk}",
            expected="its sender to encode it",
            got=f"on rank {self._status.source} {text}",
            remedy="Mend what went wrong there; the communicator can be used on.",
            rank=self._line.rank,
        )
        memory.release()
        while self._arriving:
            transfer, room = self._arriving.pop()
            transfer.cancel()
            if room is not None:
                room.release()
        return True

    def _decode(self, memory: Memory, nbytes: int, to: Buffer | None, chunk: int) -> None:
        """Queue the decoding of a frame, unless something has gone wrong already."""
        if self._fault is None and to is not None and self._coder is not None:
            where, received = f"{self._where}, chunk {chunk}", memory.part(0, nbytes)
            try:
                header = self._coder.open(received, where)
                recorded = perf_counter_ns(), nbytes, to.nbytes, chunk
                pending = self._coder.decode(header, received, to, "replace", chunk, where)
                self._working.append((pending, memory, recorded))
                return
            except Exception as error:
                self._fault = error
        memory.release()

    def _has_decoded(self) -> bool:
        """Let go of frames that have been decoded; say whether all have."""
        while self._working and self._working[0][0].done():
            pending, memory, recorded = self._working.popleft()
            if recorded is not None:
                posted, nbytes, plain, chunk = recorded
                self._call_trace.coded(DECODE, posted, nbytes, plain, 0, chunk)
            try:
                pending.result()
            except Exception as error:
                self._fault = self._fault or error
            memory.release()
        return not self._working


# A message as its sender sees it: the first part at once, then frame by frame.


class Outgoing(Message):
    """A message that is sent; its first part leaves at once."""

    def __init__(self, line: Line, blocks: Blocks, codec: Codec, peer: int, tag: int, chunk: int) -> None:
        """Send the elements to a peer, in chunks of so many bytes."""
        super().__init__(line, blocks, writable=False)
        self._peer = peer
        self._leaving: deque[tuple[Transfer, Memory | None]] = deque()
        size = blocks.buffer.dtype.itemsize
        nbytes = blocks.counts[0] * size
        raw = line.firsts.railed and codec.name == "none"
        piece = max(1, min(RAW_BYTES if raw else chunk, nbytes) // size)
        short = nbytes <= line.short
        try:
            self._source = self._elements(
                get_codec("none") if short else codec, inline=short or piece * size < INLINE_BYTES
            )
            written = self._put_whole() if short else self._announce(codec, piece, raw)
            self._first_part = line.firsts.send(self._first.address, written, peer, tag)
        except Exception:
            self._let_go(failed=True)
            raise
        starts = range(0, 0 if short else self._source.count, piece)
        self._moves = self._send_raw(starts) if raw else self._send(starts)

    def _put_whole(self) -> int:
        """Make the first part a frame of the whole message."""
        assert self._coder is not None
        source, address = self._source, self._first.address
        self._coder.stream.copy(address + frame.HEADER_BYTES, source.address, source.nbytes)
        self._coder.stream.synchronize()
        payload = zlib.adler32(ctypes.string_at(address + frame.HEADER_BYTES, source.nbytes))
        header = frame.FrameHeader(0, source.dtype, 0, source.nbytes, source.nbytes, raw=True).with_checksum(payload)
        ctypes.memmove(address, header.pack(), frame.HEADER_BYTES)
        return frame.HEADER_BYTES + source.nbytes

    def _announce(self, codec: Codec, piece: int, raw: bool = False) -> int:
        """Make the first part an announcement."""
        dtype, nbytes = self._source.dtype, self._source.nbytes
        self._call_trace = self._line.trace.begin("send", f"send, {codec.spec}, {piece}")
        self._room = piece * dtype.itemsize if raw else max(LEAST_ROOM, frame.max_frame_bytes(codec, piece, dtype))
        self._tag = self._line.free_tag()
        spec = "" if raw else codec.spec
        data = Announcement(dtype, nbytes, piece * dtype.itemsize, self._room, self._tag, spec).pack()
        ctypes.memmove(self._first.address, data, len(data))
        return len(data)

    def _send(self, starts: range) -> Moves:
        assert self._coder is not None
        for chunk, start in enumerate(starts):
            yield self._has_room
            memory = self._coder.memory(self._room)
            elements = self._source.slice(start, min(starts.step, self._source.count - start))
            posted = perf_counter_ns()
            try:
                nbytes = yield from self._coder.encode(elements, memory, chunk)
                self._call_trace.coded(ENCODE, posted, nbytes, elements.nbytes, 0, chunk)
            except Exception as error:
                self._fault = error
                nbytes = _write_note(error, memory)
            transfer = self._line.transport.send(self._peer, self._tag, memory.address, nbytes)
            transfer.posted = perf_counter_ns()
            self._leaving.append((transfer, memory))
            if self._fault is not None:
                break
        yield self._has_left
        self._packing.empty(self._coder.stream)
        if self._fault is not None:
            raise self._fault

    def _send_raw(self, starts: range) -> Moves:
        """Send the elements as they are: where they are, if the wire reaches them there."""
        assert self._coder is not None
        yield self._has_come_to()
        for start in starts:
            yield partial(self._has_room, self._depth)
            elements = self._source.slice(start, min(starts.step, self._source.count - start))
            address, memory = elements.address, None
            if not self._coder.works_in_place:
                memory = self._coder.memory(elements.nbytes)
                yield from self._coder.copy(elements, memory)
                address = memory.address
            sending = self._line.transport.send(self._peer, self._tag, address, elements.nbytes)
            sending.posted = perf_counter_ns()
            self._leaving.append((sending, memory))
        yield self._has_left
        self._packing.empty(self._coder.stream)

    def _has_room(self, depth: int = DEPTH) -> bool:
        """Let go of chunks that have been sent; say whether there may be another one."""
        while self._leaving and self._leaving[0][0].done():
            transfer, memory = self._leaving.popleft()
            self._call_trace.sent(self._peer, transfer.posted, transfer.nbytes, 0, 0, transfer.rail)
            if memory is not None:
                memory.release()
        return len(self._leaving) < depth

    def _has_left(self) -> bool:
        return self._has_room() and not self._leaving and self._first_part is not None and self._first_part.over()


def _write_note(error: Exception, memory: Memory) -> int:
    note = (NOTE + f"{type(error).__name__}: {error}".encode())[:LEAST_ROOM]
    ctypes.memmove(memory.address, note, len(note))
    return len(note)


MOST_SHORT = 1 << 15
"""Bytes of the longest message that goes as a whole: every receive that waits has room for it."""
PLAIN_CODES = frozenset("?bBhHiIlLqQfdFD")
"""The codes of the elements in numpy's arrays that every mpi4py knows."""


class PointToPoint:
    """The messages of one communicator."""

    def __init__(self, plain: MPI.Intracomm, caller: Caller, settings: Settings) -> None:
        """Let all ranks make one, on the communicator that messages without a codec take."""
        self._plain, self._caller, self._chunk = plain, caller, settings.chunk or DEFAULT_CHUNK
        self._engine, self._driver = caller.engine, caller.driver
        codec = get_codec(settings.codec)
        railed = bool(settings.rails)
        self._plainest = get_codec("none") if railed else None
        """What messages travel with that no codec was named for; None for MPI's own."""
        self._codec = self._plainest if codec.name in ("none", "auto") else codec
        firsts = LetterFirsts(caller.transport, caller.engine) if railed else MpiFirsts(plain.Dup())
        self._line = Line(firsts, caller.transport, min(MOST_SHORT, settings.passthrough_bytes), caller.engine.trace)

    def close(self, *, broken: bool) -> None:
        """End the streams; all ranks do, unless some are `broken`, and free the duplicate."""
        self._line.close()
        if not broken:
            self._line.firsts.close()

    def send(self, buf: Any, dest: int, tag: int, codec: str | Codec | None, chunk: int | None) -> None:
        """Send a message; come back when the buffer is free."""
        framed = self._framed(codec, dest)
        if framed is None:
            self._block("Send", buf, (dest, tag))
        else:
            self._begin_send(buf, dest, tag, framed, explicit=codec is not None, chunk=chunk).Wait()

    def receive(self, buf: Any, source: int, tag: int, status: MPI.Status | None, codec: str | Codec | None) -> None:
        """Receive a message."""
        if self._framed(codec, source) is None:
            self._block("Recv", buf, (source, tag), status)
        else:
            self._begin_receive(buf, source, tag).Wait(status)

    def start_send(self, buf: Any, dest: int, tag: int, codec: str | Codec | None, chunk: int | None) -> Request:
        """Start to send."""
        framed = self._framed(codec, dest)
        if framed is None:
            return self._begin("Isend", buf, (dest, tag))
        return self._pushed(self._begin_send(buf, dest, tag, framed, explicit=codec is not None, chunk=chunk))

    def start_receive(self, buf: Any, source: int, tag: int, codec: str | Codec | None) -> Request:
        """Start to receive."""
        if self._framed(codec, source) is None:
            return self._begin("Irecv", buf, (source, tag))
        return self._pushed(self._begin_receive(buf, source, tag))

    def exchange(
        self,
        out: tuple[Any, int, int],
        back: tuple[Any, int, int],
        status: MPI.Status | None,
        codec: str | Codec | None,
        chunk: int | None,
    ) -> None:
        """Send a message and receive another, each given as buffer, peer and tag."""
        if self._framed(codec, 0) is None and self._passes(out[0]) and self._passes(back[0]):
            self._plain.Sendrecv(*out, *back, *(() if status is None else (status,)))
            return
        sent, received = self.start_send(*out, codec, chunk), self.start_receive(*back, codec)
        try:
            received.Wait(status)
        finally:
            sent.Wait()

    # In frames

    def _framed(self, codec: str | Codec | None, peer: int) -> Codec | None:
        """Return the codec of a message, None if it is MPI's own."""
        if peer == MPI.PROC_NULL:
            return None
        if codec is None:
            return self._codec
        found = get_codec(codec)
        return self._plainest if found.name == "none" else found

    def _begin_send(
        self, buf: Any, dest: int, tag: int, codec: Codec, *, explicit: bool, chunk: int | None
    ) -> MessageRequest:
        blocks = self._blocks("Send", buf, writable=False)
        dtype = blocks.buffer.dtype
        if explicit:
            codec.check_dtype(dtype)
        elif dtype.name not in codec.dtypes:
            codec = get_codec("none")
        return self._under_way(Outgoing(self._line, blocks, codec, dest, tag, chunk or self._chunk))

    def _begin_receive(self, buf: Any, source: int, tag: int) -> MessageRequest:
        return self._under_way(Incoming(self._line, self._blocks("Recv", buf, writable=True), source, tag))

    def _blocks(self, method: str, buf: Any, *, writable: bool) -> Blocks:
        """Read a buffer argument."""
        if self._engine.broken is not None:
            raise self._engine.broken
        topic, rank = f"{method}, {'receive' if writable else 'send'} buffer", self._plain.rank
        blocks = specs.blocks(buf, writable=writable, topic=topic, rank=rank)
        if blocks is None:
            raise BufferSpecError(
                topic,
                expected="elements that can be encoded",
                got="a derived datatype, or elements that only MPI knows",
                remedy="Convert them first: MPI's own types do not go over rails."
                if self._plainest is not None
                else "Pass codec='none' here and on the other side.",
                rank=rank,
            )
        return blocks

    def _under_way(self, message: Outgoing | Incoming) -> MessageRequest:
        with self._driver.lock:
            self._engine.p2p_operations.append(message)
        return MessageRequest(message, self._caller)

    def _pushed(self, request: MessageRequest) -> MessageRequest:
        """Give a message a first push; whoever stops to wait leaves the rest to the background."""
        self._driver.turn()
        self._driver.push()
        return request

    # MPI's own

    def _block(self, method: str, buf: Any, rest: tuple[int, int], status: MPI.Status | None = None) -> None:
        """Let mpi4py do it, and go on with what is under way meanwhile if no thread does."""
        if self._passes(buf):
            try:
                getattr(self._plain, method)(buf, *rest, *(() if status is None else (status,)))
            except MPI.Exception as error:
                self._caller.straight.check_dead(error)
                raise
            return
        request = self._begin(f"I{method.lower()}", buf, rest)
        self._driver.wait_until(lambda: request.Test(status))

    def _passes(self, buf: Any) -> bool:
        """Say whether mpi4py's own call may be made as it is, and may wait."""
        return (self._driver.background or self._engine.idle) and _reaches(buf)

    def _begin(self, method: str, buf: Any, rest: tuple[int, int]) -> Request:
        """Let mpi4py start it, by way of the host where it cannot reach the elements."""
        detour = None if _reaches(buf) else self._detour(method, buf)
        sent = detour.args[0] if detour else buf
        request = getattr(self._plain, method)(sent, *rest)
        return PlainRequest(request, None, self._driver, (buf, sent), detour)

    def _detour(self, method: str, buf: Any) -> Detour | None:
        writable = method == "Irecv"
        blocks = specs.blocks(buf, writable=writable, topic=method, rank=self._plain.rank)
        if blocks is None:
            return None
        form = Form(method, None, blocks) if writable else Form(method, blocks, None)
        # Of a call with one buffer for both, which is what a broadcast has, the Detour brings back what is received.
        return None if passes(form, (buf,)) else Detour("Bcast" if writable else method, form, (buf, None))


class MessageRequest(Request):
    """A message that has been started."""

    def __init__(self, message: Outgoing | Incoming, caller: Caller) -> None:
        """Wait by turning the caller's driver."""
        self._message, self._engine, self._driver = message, caller.engine, caller.driver

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait until it is complete; raise what went wrong."""
        self._driver.wait_until(self._is_over)
        return self._end(status)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Say whether it is complete; raise what went wrong."""
        if not self._is_over():
            self._driver.turn()
        return self._is_over() and self._end(status)

    def Cancel(self) -> None:
        """Take a receive back, unless a message is there for it; Wait then fills a status that says so."""
        if isinstance(self._message, Incoming):
            with self._driver.lock:
                self._message.cancel()

    def _is_over(self) -> bool:
        return self._message.done or self._engine.broken is not None

    def _end(self, status: MPI.Status | None) -> bool:
        message, self._over = self._message, True
        if status is not None and message.done and isinstance(message, Incoming):
            message.fill(status)
        error = message.error if message.done else self._engine.broken
        if error is not None:
            raise error
        return True


def _reaches(buf: Any) -> bool:
    """Say whether mpi4py surely takes a buffer as it is; decided in a microsecond."""
    if type(buf) is np.ndarray:
        return buf.flags.forc and buf.dtype.char in PLAIN_CODES
    data = buf[0] if isinstance(buf, (list, tuple)) and buf else buf
    if type(data) is np.ndarray:
        return bool(data.flags.forc) and isinstance(buf[-1], (MPI.Datatype, str))
    return data is None or isinstance(data, (bytes, bytearray, memoryview, type(MPI.BOTTOM)))


# Messages from rank to rank: compressed and pipelined, or MPI's own.
