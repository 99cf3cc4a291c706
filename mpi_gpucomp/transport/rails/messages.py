"""Messages between ranks, matched by peer and tag, in order.

A short message is sent at once, in a copy, and kept at the other end until somebody asks for it. Of a long one word is
sent first. Once the receiver has room the sender's memory goes there piece by piece, with no copy in between: out of
the caller's buffer into the other caller's. The sender may use its memory again when all of it has arrived.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.errors import BufferSpecError
from mpi_gpucomp.transport.base import Transfer
from mpi_gpucomp.transport.rails.frames import ANNOUNCE, DATA, EAGER, GRANT, LETTER, LOST, Item

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from mpi_gpucomp.transport.rails.frames import Header, Payload

__all__ = ["EAGER_BYTES", "PIECE_BYTES", "Copies", "Messages", "Receiving", "Sending"]

EAGER_BYTES = 1 << 14
"""The longest message that is sent at once."""
PIECE_BYTES = 1 << 20
"""Long ones travel in pieces of so many bytes."""


class Copies(NamedTuple):
    """Copies of messages that were made on their way within a rank."""

    times: int
    nbytes: int


class _Transfer(Transfer):
    """A message under way."""

    def __init__(self, messages: Messages, peer: int, tag: int, memory: memoryview) -> None:
        self.messages, self.peer, self.tag, self.memory = messages, peer, tag, memory
        self.nbytes = 0
        self.finished = False
        self.error: Exception | None = None

    def done(self) -> bool:
        """Look; raise what went wrong."""
        fault = self.messages.fault(self.peer)  # before the look: what has arrived until then counts
        if self.finished:
            if self.error is not None:
                raise self.error
            return True
        if fault is not None:
            raise fault
        return False


class Sending(_Transfer):
    """A message that is sent."""

    def __init__(self, messages: Messages, peer: int, tag: int, memory: memoryview) -> None:
        """Begin with its first byte."""
        super().__init__(messages, peer, tag, memory)
        self.nbytes, self._drawn, self._arrived = len(memory), 0, 0
        self.number = 0

    def draw(self) -> tuple[Item, bool]:
        """Return the next piece, and whether it is the last."""
        start, self._drawn = self._drawn, min(self.nbytes, self._drawn + PIECE_BYTES)
        return Item(DATA, self.memory[start : self._drawn], self.number, start, self), self._drawn == self.nbytes

    def arrive(self, nbytes: int) -> None:
        """Count what has arrived."""
        self._arrived += nbytes
        self.finished = self._arrived == self.nbytes

    def cancel(self) -> bool:
        """Refuse: a send is not taken back."""
        return False


class Receiving(_Transfer):
    """Room for a message."""

    _left = 0

    def expect(self, nbytes: int) -> None:
        """Be about to receive so many bytes; what does not fit goes nowhere, and is an error in the end."""
        self.nbytes = self._left = nbytes
        if nbytes > len(self.memory):
            self.error = BufferSpecError(
                f"message from rank {self.peer}, tag {self.tag}",
                expected=f"at most {len(self.memory)} bytes",
                got=f"{nbytes}",
                remedy="Make room for as much as is sent.",
                rank=self.messages.rank,
            )
            self.memory = memoryview(bytearray(nbytes))

    def fill(self, payload: Payload) -> None:
        """Take a short message as a whole."""
        self.expect(len(payload))
        self.memory[: len(payload)] = payload
        self.messages.count_copy(len(payload))
        self.land(len(payload))

    def land(self, nbytes: int) -> None:
        """Count what has arrived."""
        self._left -= nbytes
        if not self._left:
            self.messages.bytes_received += self.nbytes
            self.finished = True

    def cancel(self) -> bool:
        """Take the receive back, unless a message has been found for it."""
        with self.messages.held():
            return self.messages.withdraw(self)


class _Arrival(NamedTuple):
    """A message that nobody has asked for yet: the whole of it, or word of it."""

    payload: Payload | None
    number: int
    nbytes: int
    local: Sending | None = None
    rail: int = 0


class Messages:
    """The messages and letters of one rank. Whoever calls holds the lock of the loop."""

    def __init__(
        self,
        rank: int,
        post: Callable[[int, Item], None],
        wake: Callable[[int], None],
        held: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Send by `post`; `wake` says that there is something to draw for a peer; `held` holds the lock."""
        self.rank, self._post, self._wake, self.held = rank, post, wake, held
        self.letters: deque[tuple[int, bytes] | str] = deque()
        """Letters and who left them; a text says that the ranks have lost each other."""
        self.fault: Callable[[int], Exception | None] = lambda peer: None
        """Says why nothing will come from a peer any more."""
        self.bytes_received = 0
        self.copies = Copies(0, 0)
        self._numbers: defaultdict[int, int] = defaultdict(int)
        self._announced: dict[tuple[int, int], Sending] = {}
        self._granted: defaultdict[int, deque[Sending]] = defaultdict(deque)
        self._waiting: defaultdict[tuple[int, int], deque[Receiving]] = defaultdict(deque)
        self._unasked: defaultdict[tuple[int, int], deque[_Arrival]] = defaultdict(deque)
        self._arriving: dict[tuple[int, int], Receiving] = {}

    def count_copy(self, nbytes: int) -> None:
        """Count a copy."""
        self.copies = Copies(self.copies.times + 1, self.copies.nbytes + nbytes)

    # What the caller asks for

    def send(self, peer: int, tag: int, memory: memoryview) -> Sending:
        """Start to send."""
        sending = Sending(self, peer, tag, memory)
        short = len(memory) <= EAGER_BYTES
        payload = bytes(memory) if short else None
        if short:
            self.count_copy(len(memory))
            sending.finished = True
        if peer == self.rank:
            self._arrive(peer, tag, _Arrival(payload, 0, len(memory), sending))
        elif payload is not None:
            self._post(peer, Item(EAGER, payload, tag, owner=sending))
        else:
            self._announce(sending)
        return sending

    def _announce(self, sending: Sending) -> None:
        self._numbers[sending.peer] += 1
        sending.number = self._numbers[sending.peer]
        self._announced[sending.peer, sending.number] = sending
        self._post(sending.peer, Item(ANNOUNCE, sending.number.to_bytes(8, "little"), sending.tag, sending.nbytes))

    def receive(self, peer: int, tag: int, memory: memoryview) -> Receiving:
        """Start to receive."""
        receiving = Receiving(self, peer, tag, memory)
        probe_any = self._unasked[peer, tag]
        if probe_any:
            self._meet(receiving, probe_any.popleft())
        else:
            self._waiting[peer, tag].append(receiving)
        return receiving

    def withdraw(self, receiving: Receiving) -> bool:
        """Take a receive back that nothing was found for."""
        waiting = self._waiting[receiving.peer, receiving.tag]
        if receiving not in waiting:
            return False
        waiting.remove(receiving)
        return True

    def probe_any(self) -> int | None:
        """Return the tag of a message that nobody has asked for."""
        return next((tag for (_, tag), arrivals in self._unasked.items() if arrivals), None)

    def discard(self, peer: int, tag: int) -> Receiving | None:
        """Receive a message that nobody has asked for into memory of its own."""
        probe_any = self._unasked[peer, tag]
        return self.receive(peer, tag, memoryview(bytearray(probe_any[0].nbytes))) if probe_any else None

    # What peers send

    def heard(self, peer: int, header: Header, payload: Payload, rail: int) -> None:
        """Take what has arrived in its turn."""
        if header.kind == EAGER:
            self._arrive(peer, header.message, _Arrival(payload, 0, len(payload), rail=rail))
        elif header.kind == ANNOUNCE:
            self._arrive(peer, header.message, _Arrival(None, int.from_bytes(payload, "little"), header.offset))
        elif header.kind == GRANT:
            self._granted[peer].append(self._announced.pop((peer, header.message)))
            self._wake(peer)
        elif header.kind == LETTER:
            self.letters.append((peer, bytes(payload)))
        elif header.kind == LOST:
            self.letters.append(bytes(payload).decode(errors="replace"))

    def _arrive(self, peer: int, tag: int, arrival: _Arrival) -> None:
        waiting = self._waiting[peer, tag]
        if waiting:
            self._meet(waiting.popleft(), arrival)
        else:
            self._unasked[peer, tag].append(arrival)

    def _meet(self, receiving: Receiving, arrival: _Arrival) -> None:
        """Let a message be received where there is room for it."""
        if arrival.payload is not None:
            receiving.rail = arrival.rail
            receiving.fill(arrival.payload)
        elif arrival.local is not None:
            receiving.fill(arrival.local.memory)
            arrival.local.finished = True
        else:
            receiving.expect(arrival.nbytes)
            self._arriving[receiving.peer, arrival.number] = receiving
            self._post(receiving.peer, Item(GRANT, message=arrival.number))

    def draw(self, peer: int) -> Item | None:
        """Return the next piece of the first message that a peer has room for."""
        granted = self._granted[peer]
        if not granted:
            return None
        item, last = granted[0].draw()
        if last:
            granted.popleft()
        return item

    def room(self, peer: int, header: Header) -> memoryview | None:
        """Return where a piece goes."""
        receiving = self._arriving.get((peer, header.message))
        if receiving is None or header.offset + header.length > receiving.nbytes:
            return None
        return receiving.memory[header.offset : header.offset + header.length]

    def landed(self, peer: int, header: Header, rail: int) -> None:
        """Count a piece that is there."""
        receiving = self._arriving.get((peer, header.message))
        if receiving is not None:
            receiving.rail = rail
            receiving.land(header.length)
            if receiving.finished:
                del self._arriving[peer, header.message]

    def left(self, item: Item, rail: int) -> None:
        """Let a message know which rail the last of it takes."""
        if isinstance(item.owner, Sending):
            item.owner.rail = rail

    def arrived(self, item: Item) -> None:
        """Count a piece that the peer has."""
        if isinstance(item.owner, Sending) and item.kind == DATA:
            item.owner.arrive(len(item.payload))

    def expects(self, peer: int) -> bool:
        """Say whether pieces are to come from a peer."""
        return any(sender == peer for sender, _ in self._arriving)
