"""What a link carries, as the link sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mpi_gpucomp.transport.rails.frames import Header, Item, Payload

__all__ = ["Traffic"]


class Traffic(Protocol):
    """What a link carries, as it needs to know it."""

    def draw(self, peer: int) -> Item | None:
        """Return the next piece of a message that a peer has room for."""
        ...

    def room(self, peer: int, header: Header) -> memoryview | None:
        """Return where a piece of a message goes; None for one that nobody has asked for."""
        ...

    def landed(self, peer: int, header: Header, rail: int) -> None:
        """Take notice that a piece is there, and of the rail that it took."""
        ...

    def heard(self, peer: int, header: Header, payload: Payload, rail: int) -> None:
        """Take what has arrived in its turn."""
        ...

    def left(self, item: Item, rail: int) -> None:
        """Take notice of the rail that something takes."""
        ...

    def arrived(self, item: Item) -> None:
        """Take notice that the peer has something that was sent."""
        ...

    def expects(self, peer: int) -> bool:
        """Say whether pieces of a message are to come from a peer."""
        ...
