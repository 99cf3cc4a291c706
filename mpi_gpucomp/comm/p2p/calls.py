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

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp.codec import find
from mpi_gpucomp.collectives.select import DEFAULT_CHUNK
from mpi_gpucomp.comm import specs
from mpi_gpucomp.comm.forms import Form
from mpi_gpucomp.comm.p2p.firsts import LetterFirsts, MpiFirsts
from mpi_gpucomp.comm.p2p.incoming import Incoming
from mpi_gpucomp.comm.p2p.line import Line
from mpi_gpucomp.comm.p2p.outgoing import Outgoing
from mpi_gpucomp.comm.plain import Detour, passes
from mpi_gpucomp.comm.request import PlainRequest, Request
from mpi_gpucomp.errors import BufferError

if TYPE_CHECKING:
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.comm.caller import Caller
    from mpi_gpucomp.comm.options import Settings
    from mpi_gpucomp.engine.layout import Blocks

__all__ = ["MessageRequest", "PointToPoint"]

MOST_SHORT = 1 << 15
"""Bytes of the longest message that goes as a whole: every receive that waits has room for it."""
PLAIN_CODES = frozenset("?bBhHiIlLqQfdFD")
"""The codes of the elements in numpy's arrays that every mpi4py knows."""


class PointToPoint:
    """The messages of one communicator."""

    def __init__(self, plain: MPI.Intracomm, caller: Caller, settings: Settings) -> None:
        """Let all ranks make one, on the communicator that messages without a codec take."""
        self._plain, self._caller, self._chunk = plain, caller, settings.chunk or DEFAULT_CHUNK
        self._engine, self._crank = caller.engine, caller.crank
        codec = find(settings.codec)
        railed = bool(settings.rails)
        self._plainest = find("none") if railed else None
        """What messages travel with that no codec was named for; None for MPI's own."""
        self._codec = self._plainest if codec.name in ("none", "auto") else codec
        firsts = LetterFirsts(caller.transport, caller.engine) if railed else MpiFirsts(plain.Dup())
        self._line = Line(firsts, caller.transport, min(MOST_SHORT, settings.small), caller.group)

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
        found = find(codec)
        return self._plainest if found.name == "none" else found

    def _begin_send(
        self, buf: Any, dest: int, tag: int, codec: Codec, *, explicit: bool, chunk: int | None
    ) -> MessageRequest:
        blocks = self._blocks("Send", buf, writable=False)
        dtype = blocks.buffer.dtype
        if explicit:
            codec.check_dtype(dtype)
        elif dtype.name not in codec.dtypes:
            codec = find("none")
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
            raise BufferError(
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
        with self._crank.lock:
            self._engine.errands.append(message)
        return MessageRequest(message, self._caller)

    def _pushed(self, request: MessageRequest) -> MessageRequest:
        """Give a message a first push; whoever stops to wait leaves the rest to the background."""
        self._crank.turn()
        self._crank.push()
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
        self._crank.wait_until(lambda: request.Test(status))

    def _passes(self, buf: Any) -> bool:
        """Say whether mpi4py's own call may be made as it is, and may wait."""
        return (self._crank.background or self._engine.idle) and _reaches(buf)

    def _begin(self, method: str, buf: Any, rest: tuple[int, int]) -> Request:
        """Let mpi4py start it, by way of the host where it cannot reach the elements."""
        detour = None if _reaches(buf) else self._detour(method, buf)
        sent = detour.args[0] if detour else buf
        request = getattr(self._plain, method)(sent, *rest)
        return PlainRequest(request, None, self._crank, (buf, sent), detour)

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
        """Wait by turning the caller's crank."""
        self._message, self._engine, self._crank = message, caller.engine, caller.crank

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait until it is complete; raise what went wrong."""
        self._crank.wait_until(self._is_over)
        return self._end(status)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Say whether it is complete; raise what went wrong."""
        if not self._is_over():
            self._crank.turn()
        return self._is_over() and self._end(status)

    def Cancel(self) -> None:
        """Take a receive back, unless a message is there for it; Wait then fills a status that says so."""
        if isinstance(self._message, Incoming):
            with self._crank.lock:
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
