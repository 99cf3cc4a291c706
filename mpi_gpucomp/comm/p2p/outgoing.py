"""A message as its sender sees it: the first part at once, then frame by frame."""

from __future__ import annotations

import ctypes
import zlib
from collections import deque
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING

from mpi_gpucomp.codec import find, frame
from mpi_gpucomp.comm.p2p.line import LEAST_ROOM, Announcement
from mpi_gpucomp.comm.p2p.message import DEPTH, NOTE, RAW_BYTES, Message
from mpi_gpucomp.engine.coder import INLINE_BYTES
from mpi_gpucomp.monitor.box import ENCODE

if TYPE_CHECKING:
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.comm.p2p.line import Line
    from mpi_gpucomp.comm.p2p.message import Moves
    from mpi_gpucomp.device import Memory
    from mpi_gpucomp.engine.layout import Blocks
    from mpi_gpucomp.transport.base import Transfer

__all__ = ["Outgoing"]


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
            self._source = self._elements(find("none") if short else codec, inline=short or piece * size < INLINE_BYTES)
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
        header = frame.Header(0, source.dtype, 0, source.nbytes, source.nbytes, raw=True).sealed(payload)
        ctypes.memmove(address, header.pack(), frame.HEADER_BYTES)
        return frame.HEADER_BYTES + source.nbytes

    def _announce(self, codec: Codec, piece: int, raw: bool = False) -> int:
        """Make the first part an announcement."""
        dtype, nbytes = self._source.dtype, self._source.nbytes
        self._log = self._line.log("send", f"send, {codec.spec}, {piece}")
        self._room = piece * dtype.itemsize if raw else max(LEAST_ROOM, frame.room(codec, piece, dtype))
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
                self._log.coded(ENCODE, posted, nbytes, elements.nbytes, 0, chunk)
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
            self._log.sent(self._peer, transfer.posted, transfer.nbytes, 0, 0, transfer.rail)
            if memory is not None:
                memory.release()
        return len(self._leaving) < depth

    def _has_left(self) -> bool:
        return self._has_room() and not self._leaving and self._first_part is not None and self._first_part.over()


def _write_note(error: Exception, memory: Memory) -> int:
    note = (NOTE + f"{type(error).__name__}: {error}".encode())[:LEAST_ROOM]
    ctypes.memmove(memory.address, note, len(note))
    return len(note)
