"""A message as its receiver sees it: the first part says what it is, and whether frames follow."""

from __future__ import annotations

import ctypes
import zlib
from collections import deque
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING

from mpi4py import MPI

from mpi_gpucomp.codec import find, frame
from mpi_gpucomp.comm.p2p.line import Announcement, damaged
from mpi_gpucomp.comm.p2p.message import DEPTH, NOTE, Message
from mpi_gpucomp.engine.coder import INLINE_BYTES
from mpi_gpucomp.engine.wire import AHEAD
from mpi_gpucomp.errors import BufferError, PeerError
from mpi_gpucomp.monitor.box import DECODE

if TYPE_CHECKING:
    from mpi_gpucomp.codec import Pending
    from mpi_gpucomp.comm.p2p.line import Line
    from mpi_gpucomp.comm.p2p.message import Moves
    from mpi_gpucomp.device import Buffer, DType, Memory
    from mpi_gpucomp.engine.layout import Blocks
    from mpi_gpucomp.transport.base import Transfer

__all__ = ["Incoming"]


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
            raise BufferError(
                self._title,
                expected=f"a message of at most {most} x {own}",
                got=f"{nbytes // dtype.itemsize} x {dtype}",
                remedy="Pass a receive buffer of the message's type that is at least as long.",
                rank=self._line.rank,
            )

    def _take_whole(self, data: bytes) -> None:
        header, payload = frame.parse(data, where=self._where), data[frame.HEADER_BYTES :]
        if len(payload) != header.plain or header.sealed(zlib.adler32(payload)) != header:
            raise damaged(self._where)
        self._check(header.dtype, header.plain)
        target = self._elements(find("none"), inline=True)
        assert self._coder is not None
        self._coder.stream.copy(target.address, self._first.address + frame.HEADER_BYTES, header.plain)

    def _take_frames(self, announced: Announcement) -> Moves:
        """Receive frames and decode them; if that goes wrong receive them all the same, as their sender waits."""
        target = None
        self._log = self._line.log("receive", f"receive, {announced.codec}, {announced.piece}")
        try:
            self._check(announced.dtype, announced.nbytes)
            target = self._elements(find(announced.codec), inline=announced.piece < INLINE_BYTES)
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
        self._log = self._line.log("receive", f"receive, {announced.piece}")
        try:
            self._check(announced.dtype, announced.nbytes)
            target = self._elements(find("none"), inline=False)
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
        self._log.received(self._status.source, transfer.posted, 0, transfer.nbytes, 0, chunk, transfer.rail)

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
                self._log.coded(DECODE, posted, nbytes, plain, 0, chunk)
            try:
                pending.size()
            except Exception as error:
                self._fault = self._fault or error
            memory.release()
        return not self._working
