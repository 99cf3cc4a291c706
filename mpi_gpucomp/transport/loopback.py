"""Many ranks in one process: messages are copied between their buffers.

A send completes when the message has been received, as in a network's rendezvous protocol, or at once if it has at most
`eager` bytes. Programs that rely on more buffering than MPI guarantees deadlock here too.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque

from mpi_gpucomp.transport.base import Transfer, Transport

__all__ = ["LoopbackNetwork", "loopback"]


class _LoopbackSend(Transfer):
    """A posted send: the caller's memory, or a copy of it (eager)."""

    def __init__(self, address: int, nbytes: int, *, eager: bool) -> None:
        self.nbytes = nbytes
        self._copy = ctypes.string_at(address, nbytes) if eager else None
        self._address, self._taken = address, False

    def take(self, to: int) -> None:
        """Copy the bytes to the receiver's buffer."""
        ctypes.memmove(to, self._copy if self._copy is not None else self._address, self.nbytes)
        self._taken = True

    def done(self) -> bool:
        """Return True if the bytes have been copied."""
        return self._taken or self._copy is not None

    def cancel(self) -> bool:
        """Refuse: sends are not cancelled."""
        return False


class _LoopbackRecv(Transfer):
    """A posted receive."""

    def __init__(self, transport: _Loopback, key: tuple[int, int, int], address: int, capacity: int) -> None:
        self._transport = transport
        self._posted_receives, self._messages = transport.network.posted[key], transport.network.messages[key]
        self.address, self.capacity, self.nbytes, self.filled = address, capacity, 0, False

    def fill(self, message: _LoopbackSend) -> None:
        """Receive a message."""
        assert message.nbytes <= self.capacity, f"a message of {message.nbytes} bytes, capacity {self.capacity}"
        message.take(self.address)
        self.nbytes, self.filled = message.nbytes, True
        self._transport.bytes_received += message.nbytes

    def done(self) -> bool:
        """Match sends with posted receives, in order."""
        while self._posted_receives and self._messages:
            self._posted_receives.popleft().fill(self._messages.popleft())
        return self.filled

    def cancel(self) -> bool:
        """Cancel the receive unless a message has matched it."""
        if self.done():
            return False
        self._posted_receives.remove(self)
        return True


class _LoopbackDiscard(Transfer):
    """A receive that owns its buffer."""

    def __init__(self, receive: Transfer, memory: object) -> None:
        self._receive, self._memory = receive, memory
        self.nbytes = 0

    def done(self) -> bool:
        """Poll the receive."""
        return self._receive.done()

    def cancel(self) -> bool:
        """Refuse: the message has matched."""
        return False


class LoopbackNetwork:
    """The queues shared by the ranks of one process."""

    def __init__(self, size: int, eager: int = 0) -> None:
        """Connect `size` ranks; sends of at most `eager` bytes complete at once."""
        self.size, self.eager = size, eager
        self.messages: dict[tuple[int, int, int], deque[_LoopbackSend]] = defaultdict(deque)
        self.posted: dict[tuple[int, int, int], deque[_LoopbackRecv]] = defaultdict(deque)
        self.control: list[deque[tuple[int, bytes]]] = [deque() for _ in range(size)]


class _Loopback(Transport):
    """One rank of the network."""

    largest_tag = (1 << 31) - 1

    def __init__(self, network: LoopbackNetwork, rank: int) -> None:
        self.network, self.rank, self.size = network, rank, network.size

    def send(self, peer: int, tag: int, address: int, nbytes: int) -> Transfer:
        """Queue a message for the peer."""
        self.bytes_sent += nbytes
        message = _LoopbackSend(address, nbytes, eager=nbytes <= self.network.eager)
        self.network.messages[self.rank, peer, tag].append(message)
        return message

    def receive(self, peer: int, tag: int, address: int, capacity: int) -> Transfer:
        """Queue a receive."""
        key = peer, self.rank, tag
        receive = _LoopbackRecv(self, key, address, capacity)
        self.network.posted[key].append(receive)
        return receive

    def probe_any(self) -> int | None:
        """Find a queue with more sends than posted receives."""
        mine = (key for key in self.network.messages if key[1] == self.rank)
        return next((tag for peer, _, tag in mine if self._has_unexpected(peer, tag)), None)

    def _has_unexpected(self, peer: int, tag: int) -> bool:
        key = peer, self.rank, tag
        return len(self.network.messages[key]) > len(self.network.posted[key])

    def discard(self, peer: int, tag: int) -> Transfer | None:
        """Receive an unexpected message into temporary memory."""
        if not self._has_unexpected(peer, tag):
            return None
        key = peer, self.rank, tag
        message = self.network.messages[key][len(self.network.posted[key])]
        memory = ctypes.create_string_buffer(max(1, message.nbytes))
        receive = self.receive(peer, tag, ctypes.addressof(memory), message.nbytes)
        return _LoopbackDiscard(receive, memory)

    def send_control(self, peer: int, message: bytes) -> None:
        """Queue a control message."""
        self.network.control[peer].append((self.rank, message))

    def recv_control(self) -> tuple[int, bytes] | None:
        """Return the next control message."""
        queue = self.network.control[self.rank]
        return queue.popleft() if queue else None

    def revoke(self) -> None:
        """Do nothing: ranks of one process fail together."""

    def close(self) -> None:
        """Do nothing: the network is freed with its last rank."""


def loopback(size: int, eager: int = 0) -> list[Transport]:
    """Return the transports of all ranks of a new network."""
    network = LoopbackNetwork(size, eager)
    return [_Loopback(network, rank) for rank in range(size)]
