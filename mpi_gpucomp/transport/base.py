"""The transport interface: non-blocking messages between ranks, ordered for each pair of ranks and tag.

A transport moves bytes between addresses and knows nothing of collectives. A message may be shorter than the buffer of
its receive, and never longer. No call blocks: `Transfer.done` polls, and polling makes progress. Ranks can also
exchange small control messages, which need no posted receive and no tag. Any call raises RankFailedError when a peer is
lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["Transfer", "Transport"]


class Transfer(ABC):
    """A posted send or receive."""

    nbytes: int
    """The length of the message; of a receive, valid once it has completed."""
    rail = 0
    """The rail that carries it, by index; the last one if several do."""
    posted = 0
    """When the transfer was posted; for a relayed message, when its last byte arrived."""
    waited = 0
    """When a lane first blocked on it; 0 if never."""

    @abstractmethod
    def done(self) -> bool:
        """Return True if the transfer has completed; may raise its error."""

    def begun(self) -> bool:
        """Return True if a part of the message has arrived and can be relayed."""
        return self.done()

    @abstractmethod
    def cancel(self) -> bool:
        """Cancel a receive that no message has matched; return False if one has, and it continues."""


class Transport(ABC):
    """Point-to-point messages with the other ranks."""

    rank: int
    size: int

    largest_tag: int
    """Tags are 0 .. largest_tag."""

    bytes_sent = 0
    bytes_received = 0
    """Of all messages so far, without control messages."""

    @abstractmethod
    def send(self, peer: int, tag: int, address: int, nbytes: int) -> Transfer:
        """Post a send; the memory must not change until it has completed."""

    @abstractmethod
    def receive(self, peer: int, tag: int, address: int, capacity: int) -> Transfer:
        """Post a receive for a message of at most `capacity` bytes."""

    def relay(self, received: Transfer, peer: int, tag: int) -> Transfer | None:
        """Forward a message while it still arrives; return None where this has no benefit."""
        return None

    @abstractmethod
    def probe_any(self) -> int | None:
        """Return the tag of an unexpected message (no receive is posted for it), if there is one."""

    @abstractmethod
    def discard(self, peer: int, tag: int) -> Transfer | None:
        """Receive and drop an unexpected message; return None if there is none."""

    @abstractmethod
    def send_control(self, peer: int, message: bytes) -> None:
        """Send a control message; those from one rank arrive in order."""

    @abstractmethod
    def recv_control(self) -> tuple[int, bytes] | None:
        """Return the sender and the bytes of the next control message, if one has arrived."""

    @abstractmethod
    def revoke(self) -> None:
        """Make pending and later calls of every rank fail, where the network supports it."""

    @abstractmethod
    def close(self) -> None:
        """Release the transport's resources; collective, with nothing in flight."""

    def abandon(self) -> None:  # noqa: B027
        """Release what this rank can release alone, where other ranks may not call `close`."""
