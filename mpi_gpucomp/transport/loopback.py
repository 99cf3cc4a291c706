"""Many ranks in one process: messages are copied from one rank's memory to another's.

A send is done when the message has been received, as with the rendezvous of a real network, or at once if it is at most
`eager` bytes. So programs that rely on more buffering than MPI promises get stuck here too.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque

from mpi_gpucomp.transport.base import Transfer, Transport

__all__ = ["LoopbackNetwork", "loopback"]


class _Message(Transfer):
    """A message that is sent: its bytes, where they are or (eager) a copy of them."""

    def __init__(self, address: int, nbytes: int, *, eager: bool) -> None:
        self.nbytes = nbytes
        self._copy = ctypes.string_at(address, nbytes) if eager else None
        self._address, self._taken = address, False

    def take(self, to: int) -> None:
        """Copy the bytes to where they are wanted."""
        ctypes.memmove(to, self._copy if self._copy is not None else self._address, self.nbytes)
        self._taken = True

    def done(self) -> bool:
        """Say whether the bytes have been copied."""
        return self._taken or self._copy is not None

    def cancel(self) -> bool:
        """Refuse: a send is not taken back."""
        return False


class _Receive(Transfer):
    """Room for a message."""

    def __init__(self, transport: _Loopback, key: tuple[int, int, int], address: int, room: int) -> None:
        self._transport = transport
        self._waiting, self._messages = transport.network.waiting[key], transport.network.messages[key]
        self.address, self.room, self.nbytes, self.filled = address, room, 0, False

    def fill(self, message: _Message) -> None:
        """Take a message."""
        assert message.nbytes <= self.room, f"a message of {message.nbytes} bytes for {self.room} bytes of room"
        message.take(self.address)
        self.nbytes, self.filled = message.nbytes, True
        self._transport.bytes_received += message.nbytes

    def done(self) -> bool:
        """Match what has been sent with what waits for it, in order."""
        while self._waiting and self._messages:
            self._waiting.popleft().fill(self._messages.popleft())
        return self.filled

    def cancel(self) -> bool:
        """Take the receive back, unless a message is there for it."""
        if self.done():
            return False
        self._waiting.remove(self)
        return True


class _Kept(Transfer):
    """A receive with the room that it needs."""

    def __init__(self, receive: Transfer, room: object) -> None:
        self._receive, self._room = receive, room
        self.nbytes = 0

    def done(self) -> bool:
        """Ask the receive."""
        return self._receive.done()

    def cancel(self) -> bool:
        """Refuse: the message is there."""
        return False


class LoopbackNetwork:
    """What the ranks of one process have in common."""

    def __init__(self, size: int, eager: int = 0) -> None:
        """Make room for `size` ranks; messages of at most `eager` bytes are done at once."""
        self.size, self.eager = size, eager
        self.messages: dict[tuple[int, int, int], deque[_Message]] = defaultdict(deque)
        self.waiting: dict[tuple[int, int, int], deque[_Receive]] = defaultdict(deque)
        self.letters: list[deque[tuple[int, bytes]]] = [deque() for _ in range(size)]


class _Loopback(Transport):
    """One rank of the network."""

    largest_tag = (1 << 31) - 1

    def __init__(self, network: LoopbackNetwork, rank: int) -> None:
        self.network, self.rank, self.size = network, rank, network.size

    def send(self, peer: int, tag: int, address: int, nbytes: int) -> Transfer:
        """Leave a message for the peer."""
        self.bytes_sent += nbytes
        message = _Message(address, nbytes, eager=nbytes <= self.network.eager)
        self.network.messages[self.rank, peer, tag].append(message)
        return message

    def receive(self, peer: int, tag: int, address: int, room: int) -> Transfer:
        """Wait in line for a message of the peer's."""
        key = peer, self.rank, tag
        receive = _Receive(self, key, address, room)
        self.network.waiting[key].append(receive)
        return receive

    def probe_any(self) -> int | None:
        """Compare what was sent with what is waited for."""
        mine = (key for key in self.network.messages if key[1] == self.rank)
        return next((tag for peer, _, tag in mine if self._arrived(peer, tag)), None)

    def _arrived(self, peer: int, tag: int) -> bool:
        key = peer, self.rank, tag
        return len(self.network.messages[key]) > len(self.network.waiting[key])

    def discard(self, peer: int, tag: int) -> Transfer | None:
        """Take a message to nowhere."""
        if not self._arrived(peer, tag):
            return None
        key = peer, self.rank, tag
        message = self.network.messages[key][len(self.network.waiting[key])]
        room = ctypes.create_string_buffer(max(1, message.nbytes))
        return _Kept(self.receive(peer, tag, ctypes.addressof(room), message.nbytes), room)

    def send_control(self, peer: int, letter: bytes) -> None:
        """Leave a letter."""
        self.network.letters[peer].append((self.rank, letter))

    def recv_control(self) -> tuple[int, bytes] | None:
        """Take the next letter."""
        letters = self.network.letters[self.rank]
        return letters.popleft() if letters else None

    def revoke(self) -> None:
        """Do nothing: nobody is lost in one process."""

    def close(self) -> None:
        """Do nothing: the network goes with its last rank."""


def loopback(size: int, eager: int = 0) -> list[Transport]:
    """Make the transports of all ranks of a network of their own."""
    network = LoopbackNetwork(size, eager)
    return [_Loopback(network, rank) for rank in range(size)]
