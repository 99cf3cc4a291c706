"""The link protocol: packets, and the sequence numbers of both ends.

A packet is a fixed header and a payload. Most kinds have a number in the link's sequence and arrive exactly once,
however often paths break. The others concern the path itself or the acknowledgements, and are lost with the path.

A link has one sequence of packets each way, over whatever paths. The sender's state is posted >= transmitted >= acked;
it keeps what is not acked. The receiver's is received >= delivered: packets below `delivered` were handed on in order
and are acked. A path that breaks loses what was in flight on it. The sender does not guess what that was: it waits
until the receiver has closed that path too and reports its `AckState`. Packets that the receiver does not have are
retransmitted, once the path has released the memory they were sent from.
"""

from __future__ import annotations

import heapq
import struct
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ABORT",
    "ACK",
    "BYE",
    "CONTROL",
    "CTS",
    "DATA",
    "EAGER",
    "HEADER_BYTES",
    "MAX_PAYLOAD_BYTES",
    "PING",
    "RTS",
    "STATE",
    "AckState",
    "Outgoing",
    "PacketHeader",
    "PathId",
    "Payload",
    "ReceiveSequence",
    "SendSequence",
]

Payload = bytes | bytearray | memoryview

DATA, EAGER, RTS, CTS, CONTROL, BYE, ABORT = range(1, 8)
"""In sequence: a segment of a message, a short message, ready and clear to send, a control message, end, failure."""
ACK, PING, STATE = range(8, 11)
"""Out of sequence: an acknowledgement, a liveness probe, the receiver's state after a path was lost."""

MAX_PAYLOAD_BYTES = 1 << 30
"""The longest payload; a header with a longer one is malformed."""
_HEADER = struct.Struct("<BxxxIQQQQ")
HEADER_BYTES = _HEADER.size
_NUMBER = struct.Struct("<Q")

T = TypeVar("T")


class PacketHeader(NamedTuple):
    """The header of a packet."""

    kind: int
    length: int
    """Bytes of the payload."""
    sequence: int
    acked: int
    """Every packet of the peer below this number has arrived."""
    message: int = 0
    """The message's number; of EAGER and RTS its tag."""
    offset: int = 0
    """The payload's offset in the message; of RTS the message's length."""

    @property
    def in_sequence(self) -> bool:
        """Return True if the packet has a sequence number."""
        return self.kind <= ABORT

    @property
    def malformed(self) -> bool:
        """Return True if this is not a header of this protocol."""
        return not DATA <= self.kind <= STATE or self.length > MAX_PAYLOAD_BYTES

    def pack(self) -> bytes:
        """Return the header's bytes."""
        return _HEADER.pack(*self)

    @classmethod
    def unpack(cls, data: Payload) -> PacketHeader:
        """Read the bytes of a header, which may be `malformed`."""
        return cls._make(_HEADER.unpack(data))


class Outgoing(NamedTuple):
    """A packet to be sent in sequence, kept until the peer has acked it."""

    kind: int
    payload: Payload = b""
    message: int = 0
    offset: int = 0
    owner: object = None
    """The transfer that is notified of the ack."""


class PathId(NamedTuple):
    """A path: its rail, and its generation (the number of paths so far) on that rail."""

    rail: int
    generation: int


class AckState(NamedTuple):
    """What a receiver has, once it has closed all paths of each rail up to a generation."""

    delivered: int
    out_of_order: tuple[int, ...]
    """Packets that have arrived ahead of a missing one."""
    closed: tuple[int, ...]
    """For each rail, the last generation that is closed."""

    def pack(self) -> bytes:
        """Return the state's bytes."""
        numbers = (self.delivered, len(self.closed), *self.closed, *self.out_of_order)
        return struct.pack(f"<{len(numbers)}Q", *numbers)

    @classmethod
    def unpack(cls, data: bytes, rails: int) -> AckState | None:
        """Read a state for `rails` rails; return None if it is malformed."""
        if len(data) % _NUMBER.size or len(data) < (2 + rails) * _NUMBER.size:
            return None
        delivered, count, *rest = (number for (number,) in _NUMBER.iter_unpack(data))
        return cls(delivered, tuple(rest[rails:]), tuple(rest[:rails])) if count == rails else None


class SendSequence(Generic[T]):
    """The sender's end of a sequence, and the items it keeps."""

    def __init__(self) -> None:
        """Start an empty sequence."""
        self.posted = self.transmitted = self.acked = 0
        self._kept: dict[int, T] = {}
        self._path_of: dict[int, PathId | None] = {}
        """The path that each item was given to; None once it is known to have arrived or is queued again."""
        self._retransmit: list[int] = []
        self._delivered = 0
        """What the receiver is known to have delivered."""
        self._held: dict[PathId, AckState | None] = {}
        """Closing paths that may still read their items, and the receiver's state for them, if it has arrived."""

    def post(self, item: T) -> int:
        """Append to the sequence."""
        number = self.posted
        self._kept[number] = item
        self.posted += 1
        return number

    def take(self, path: PathId) -> tuple[int, T] | None:
        """Return the next item for a path to send: retransmissions first."""
        while self._retransmit:
            number = heapq.heappop(self._retransmit)
            if number in self._kept:
                self._path_of[number] = path
                return number, self._kept[number]
        if self.transmitted == self.posted:
            return None
        number, self.transmitted = self.transmitted, self.transmitted + 1
        self._path_of[number] = path
        return number, self._kept[number]

    def ack(self, delivered: int) -> list[T]:
        """Release and return the items that have arrived, up to the first that a closing path may still read."""
        released = []
        self._delivered = max(self._delivered, delivered)
        while self.acked < min(self._delivered, self.transmitted) and self._path_of.get(self.acked) not in self._held:
            released.append(self._kept.pop(self.acked))
            self._path_of.pop(self.acked, None)
            self.acked += 1
        return released

    def resume(self, state: AckState) -> list[T]:
        """Queue retransmissions for the paths that the receiver has closed; return the items that have arrived."""
        released = self.ack(state.delivered)
        arrived = set(state.out_of_order)
        self._held.update({path: state for path in self._held if path.generation <= state.closed[path.rail]})
        for number, path in self._path_of.items():
            if path is not None and path not in self._held and path.generation <= state.closed[path.rail]:
                self._path_of[number] = None
                if number not in arrived:
                    heapq.heappush(self._retransmit, number)
        return released

    def hold(self, path: PathId) -> None:
        """Keep the items of a closing path until it is released."""
        self._held[path] = None

    def release(self, path: PathId) -> list[T]:
        """Continue with the items of a path that has closed; return those that have arrived."""
        state = self._held.pop(path)
        return self.ack(self._delivered) if state is None else self.resume(state)

    @property
    def all_acked(self) -> bool:
        """Return True if everything has arrived."""
        return self.acked == self.posted


class ReceiveSequence(Generic[T]):
    """The receiver's end of a sequence, and the items that have arrived out of order."""

    def __init__(self) -> None:
        """Start an empty sequence."""
        self.received = self.delivered = 0
        self._out_of_order: dict[int, T | None] = {}
        self._arriving: dict[int, PathId] = {}

    def begin(self, number: int, path: PathId) -> bool:
        """Accept a packet that begins to arrive; return False for a duplicate."""
        if number < self.delivered or number in self._out_of_order or number in self._arriving:
            return False
        self._arriving[number] = path
        return True

    def finish(self, number: int, item: T | None) -> list[T]:
        """Take a packet that has arrived; return the items that are now in order (None is for unordered ones)."""
        del self._arriving[number]
        self._out_of_order[number] = item
        self.received = max(self.received, number + 1)
        ready = []
        while self.delivered in self._out_of_order:
            waiting = self._out_of_order.pop(self.delivered)
            self.delivered += 1
            if waiting is not None:
                ready.append(waiting)
        return ready

    def drop_partial(self, lost: Callable[[PathId], bool]) -> None:
        """Forget the packets that had only begun to arrive on lost paths."""
        self._arriving = {number: path for number, path in self._arriving.items() if not lost(path)}

    def ack_state(self, closed: tuple[int, ...]) -> AckState:
        """Return what has arrived."""
        return AckState(self.delivered, tuple(self._out_of_order), closed)
