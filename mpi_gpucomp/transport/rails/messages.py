"""Messages between ranks, matched by peer and tag, in order.

A short message is sent eagerly, as a copy, and kept by the receiver until a receive matches it. A long one uses a
rendezvous: the sender announces it (RTS), the receiver answers once a receive has matched (CTS), and segments go from
the sender's buffer into the receiver's without a copy in between. The send completes when all of it has arrived.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.errors import BufferSpecError
from mpi_gpucomp.transport.base import Transfer
from mpi_gpucomp.transport.rails.sequence import ABORT, CONTROL, CTS, DATA, EAGER, RTS, Outgoing

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from mpi_gpucomp.transport.rails.sequence import PacketHeader, Payload

__all__ = ["EAGER_BYTES", "RAIL_SEGMENT_BYTES", "Copies", "RailRecv", "RailSend", "TagMatcher"]

EAGER_BYTES = 1 << 14
"""The longest message that is sent eagerly."""
RAIL_SEGMENT_BYTES = 1 << 20
"""Bytes of the segments of longer messages."""


class Copies(NamedTuple):
    """Copies of messages made within a rank."""

    times: int
    nbytes: int


class _RailTransfer(Transfer):
    """A message in flight."""

    def __init__(self, matcher: TagMatcher, peer: int, tag: int, memory: memoryview) -> None:
        self.matcher, self.peer, self.tag, self.memory = matcher, peer, tag, memory
        self.nbytes = 0
        self.finished = False
        self.error: Exception | None = None

    def done(self) -> bool:
        """Return True if the transfer has completed; raise its error."""
        fault = self.matcher.fault(self.peer)  # before the test: what has arrived until then counts
        if self.finished:
            if self.error is not None:
                raise self.error
            return True
        if fault is not None:
            raise fault
        return False


class RailSend(_RailTransfer):
    """A posted send."""

    def __init__(self, matcher: TagMatcher, peer: int, tag: int, memory: memoryview) -> None:
        """Start at the first byte."""
        super().__init__(matcher, peer, tag, memory)
        self.nbytes, self._sent, self._acked = len(memory), 0, 0
        self.number = 0

    def next_segment(self) -> tuple[Outgoing, bool]:
        """Return the next segment, and whether it is the last."""
        start, self._sent = self._sent, min(self.nbytes, self._sent + RAIL_SEGMENT_BYTES)
        return Outgoing(DATA, self.memory[start : self._sent], self.number, start, self), self._sent == self.nbytes

    def on_acked(self, nbytes: int) -> None:
        """Count bytes that have arrived."""
        self._acked += nbytes
        self.finished = self._acked == self.nbytes

    def cancel(self) -> bool:
        """Refuse: sends are not cancelled."""
        return False


class RailRecv(_RailTransfer):
    """A posted receive."""

    _left = 0

    def expect(self, nbytes: int) -> None:
        """Prepare for a message; one that is too long is received elsewhere, and is an error on completion."""
        self.nbytes = self._left = nbytes
        if nbytes > len(self.memory):
            self.error = BufferSpecError(
                f"message from rank {self.peer}, tag {self.tag}",
                expected=f"at most {len(self.memory)} bytes",
                got=f"{nbytes}",
                remedy="Pass a receive buffer as large as the message.",
                rank=self.matcher.rank,
            )
            self.memory = memoryview(bytearray(nbytes))

    def fill(self, payload: Payload) -> None:
        """Receive a short message by a copy."""
        self.expect(len(payload))
        self.memory[: len(payload)] = payload
        self.matcher.count_copy(len(payload))
        self.on_received(len(payload))

    def on_received(self, nbytes: int) -> None:
        """Count bytes that have arrived."""
        self._left -= nbytes
        if not self._left:
            self.matcher.bytes_received += self.nbytes
            self.finished = True

    def cancel(self) -> bool:
        """Cancel the receive unless a message has matched it."""
        with self.matcher.locked():
            return self.matcher.cancel(self)


class _Unexpected(NamedTuple):
    """A message that no receive has matched yet: its payload, or its RTS."""

    payload: Payload | None
    number: int
    nbytes: int
    local: RailSend | None = None
    rail: int = 0


class TagMatcher:
    """The messages and control messages of one rank. Callers hold the event loop's lock."""

    def __init__(
        self,
        rank: int,
        post: Callable[[int, Outgoing], None],
        wake: Callable[[int], None],
        locked: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Send with `post`; `wake` announces segments to a peer's link; `locked` takes the lock."""
        self.rank, self._post, self._wake, self.locked = rank, post, wake, locked
        self.control: deque[tuple[int, bytes] | str] = deque()
        """Received control messages with their senders; a string is the reason of an ABORT."""
        self.fault: Callable[[int], Exception | None] = lambda peer: None
        """Returns why a peer cannot be reached any more."""
        self.bytes_received = 0
        self.copies = Copies(0, 0)
        self._numbers: defaultdict[int, int] = defaultdict(int)
        self._announced: dict[tuple[int, int], RailSend] = {}
        self._cleared: defaultdict[int, deque[RailSend]] = defaultdict(deque)
        self._posted: defaultdict[tuple[int, int], deque[RailRecv]] = defaultdict(deque)
        self._unexpected: defaultdict[tuple[int, int], deque[_Unexpected]] = defaultdict(deque)
        self._arriving: dict[tuple[int, int], RailRecv] = {}

    def count_copy(self, nbytes: int) -> None:
        """Count a copy."""
        self.copies = Copies(self.copies.times + 1, self.copies.nbytes + nbytes)

    # Called by the transport

    def send(self, peer: int, tag: int, memory: memoryview) -> RailSend:
        """Post a send."""
        send = RailSend(self, peer, tag, memory)
        eager = len(memory) <= EAGER_BYTES
        payload = bytes(memory) if eager else None
        if eager:
            self.count_copy(len(memory))
            send.finished = True
        if peer == self.rank:
            self._arrive(peer, tag, _Unexpected(payload, 0, len(memory), send))
        elif payload is not None:
            self._post(peer, Outgoing(EAGER, payload, tag, owner=send))
        else:
            self._announce(send)
        return send

    def _announce(self, send: RailSend) -> None:
        self._numbers[send.peer] += 1
        send.number = self._numbers[send.peer]
        self._announced[send.peer, send.number] = send
        self._post(send.peer, Outgoing(RTS, send.number.to_bytes(8, "little"), send.tag, send.nbytes))

    def receive(self, peer: int, tag: int, memory: memoryview) -> RailRecv:
        """Post a receive."""
        receive = RailRecv(self, peer, tag, memory)
        unexpected = self._unexpected[peer, tag]
        if unexpected:
            self._match(receive, unexpected.popleft())
        else:
            self._posted[peer, tag].append(receive)
        return receive

    def cancel(self, receive: RailRecv) -> bool:
        """Cancel a receive that no message has matched."""
        posted = self._posted[receive.peer, receive.tag]
        if receive not in posted:
            return False
        posted.remove(receive)
        return True

    def probe_any(self) -> int | None:
        """Return the tag of an unexpected message."""
        return next((tag for (_, tag), messages in self._unexpected.items() if messages), None)

    def discard(self, peer: int, tag: int) -> RailRecv | None:
        """Receive an unexpected message into temporary memory."""
        unexpected = self._unexpected[peer, tag]
        return self.receive(peer, tag, memoryview(bytearray(unexpected[0].nbytes))) if unexpected else None

    # Called by the links

    def on_packet(self, peer: int, header: PacketHeader, payload: Payload, rail: int) -> None:
        """Handle a packet in sequence."""
        if header.kind == EAGER:
            self._arrive(peer, header.message, _Unexpected(payload, 0, len(payload), rail=rail))
        elif header.kind == RTS:
            self._arrive(peer, header.message, _Unexpected(None, int.from_bytes(payload, "little"), header.offset))
        elif header.kind == CTS:
            self._cleared[peer].append(self._announced.pop((peer, header.message)))
            self._wake(peer)
        elif header.kind == CONTROL:
            self.control.append((peer, bytes(payload)))
        elif header.kind == ABORT:
            self.control.append(bytes(payload).decode(errors="replace"))

    def _arrive(self, peer: int, tag: int, message: _Unexpected) -> None:
        posted = self._posted[peer, tag]
        if posted:
            self._match(posted.popleft(), message)
        else:
            self._unexpected[peer, tag].append(message)

    def _match(self, receive: RailRecv, message: _Unexpected) -> None:
        """Receive a message into a posted buffer."""
        if message.payload is not None:
            receive.rail = message.rail
            receive.fill(message.payload)
        elif message.local is not None:
            receive.fill(message.local.memory)
            message.local.finished = True
        else:
            receive.expect(message.nbytes)
            self._arriving[receive.peer, message.number] = receive
            self._post(receive.peer, Outgoing(CTS, message=message.number))

    def next_segment(self, peer: int) -> Outgoing | None:
        """Return the next segment of the first message that a peer has cleared."""
        cleared = self._cleared[peer]
        if not cleared:
            return None
        segment, last = cleared[0].next_segment()
        if last:
            cleared.popleft()
        return segment

    def segment_buffer(self, peer: int, header: PacketHeader) -> memoryview | None:
        """Return the destination of a segment; None if no receive expects it."""
        receive = self._arriving.get((peer, header.message))
        if receive is None or header.offset + header.length > receive.nbytes:
            return None
        return receive.memory[header.offset : header.offset + header.length]

    def on_segment(self, peer: int, header: PacketHeader, rail: int) -> None:
        """Count a segment that has arrived, and note its rail."""
        receive = self._arriving.get((peer, header.message))
        if receive is not None:
            receive.rail = rail
            receive.on_received(header.length)
            if receive.finished:
                del self._arriving[peer, header.message]

    def on_sent(self, item: Outgoing, rail: int) -> None:
        """Note the rail of a packet that is sent."""
        if isinstance(item.owner, RailSend):
            item.owner.rail = rail

    def on_acked(self, item: Outgoing) -> None:
        """Count a segment that the peer has acked."""
        if isinstance(item.owner, RailSend) and item.kind == DATA:
            item.owner.on_acked(len(item.payload))

    def is_receiving(self, peer: int) -> bool:
        """Return True if segments of a message are expected from a peer."""
        return any(sender == peer for sender, _ in self._arriving)
