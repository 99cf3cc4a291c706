"""What a transport is: messages between ranks, non-blocking, in order for each pair of ranks and tag.

It moves bytes between addresses and knows nothing of collectives. A message may be shorter than the room for it, and
never longer. Nobody waits here: whoever wants to know asks `done`, and asking is what makes messages move. Besides,
ranks can leave each other short letters, which need no room and no tag. Any call raises RankFailedError when a peer is
lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["Transfer", "Transport"]


class Transfer(ABC):
    """A message on its way."""

    nbytes: int
    """The length of the message; of one that is received, once it is done."""
    rail = 0
    """Which of several rails it takes, by its place among them; the last one, where it takes several."""
    posted = 0
    """When it was started, or all was there that is sent on while it arrives, and"""
    waited = 0
    """since when somebody cannot go on without it, for the monitor; 0 if nobody has said so."""

    @abstractmethod
    def done(self) -> bool:
        """Say whether the memory is free (sent) or filled (received); never waits, and may raise what went wrong."""

    def begun(self) -> bool:
        """Say whether a part of a message that is received is there, which can be sent on."""
        return self.done()

    @abstractmethod
    def cancel(self) -> bool:
        """Take back a receive that nothing has arrived for; False if something has, and it goes on."""


class Transport(ABC):
    """The way to the other ranks."""

    rank: int
    size: int

    largest_tag: int
    """Tags are 0 .. largest_tag."""

    bytes_sent = 0
    bytes_received = 0
    """Of all messages so far; letters do not count."""

    @abstractmethod
    def send(self, peer: int, tag: int, address: int, nbytes: int) -> Transfer:
        """Start to send bytes, which must stay as they are until it is done."""

    @abstractmethod
    def receive(self, peer: int, tag: int, address: int, room: int) -> Transfer:
        """Start to receive a message of at most `room` bytes."""

    def relay(self, received: Transfer, peer: int, tag: int) -> Transfer | None:
        """Start to send on a message that has begun to arrive, as it does; None where that gains nothing."""
        return None

    @abstractmethod
    def probe_any(self) -> int | None:
        """Return the tag of a message that is there and that nobody has asked for yet, if there is one."""

    @abstractmethod
    def discard(self, peer: int, tag: int) -> Transfer | None:
        """Start to receive a message only to throw it away; None if there is none that nobody has asked for."""

    @abstractmethod
    def send_control(self, peer: int, letter: bytes) -> None:
        """Leave a letter for a peer; letters of one rank arrive in order."""

    @abstractmethod
    def recv_control(self) -> tuple[int, bytes] | None:
        """Return the next letter and who left it, if there is one."""

    @abstractmethod
    def revoke(self) -> None:
        """Make every rank's calls fail, those that wait too, where the network can do that."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what the transport holds; nothing is on its way any more."""

    def abandon(self) -> None:  # noqa: B027
        """Let go of what this rank can let go of by itself, where not all ranks come to close it."""
