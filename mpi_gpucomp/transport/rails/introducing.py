"""What two ends that have proved themselves tell each other before they are a path: a card each, of any form."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from mpi_gpucomp.transport.rails.handshake import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.transport.rails.handshake import Answering, Dialling, Hello

__all__ = ["MOST_CARD_BYTES", "Introducing"]

MOST_CARD_BYTES = 1 << 14
_LENGTH = struct.Struct("<I")


class Introducing:
    """A handshake that goes on with an exchange of cards; nobody's card is made or read before it is over."""

    def __init__(self, talk: Answering | Dialling, card: Callable[[], bytes]) -> None:
        """Begin as the handshake does."""
        self._talk, self._card = talk, card
        self.first, self.calls, self.done = talk.first, talk.calls, False
        self.theirs = b""
        """The other end's card."""
        self._length: int | None = None

    @property
    def hello(self) -> Hello | None:
        """Who dials whom, as far as that is known."""
        return self._talk.hello

    @property
    def wants(self) -> int:
        """Say how many bytes are to be read next."""
        if not self._talk.done:
            return self._talk.wants
        return _LENGTH.size if self._length is None else self._length

    def take(self, data: bytes) -> bytes:
        """Take what was read, and return what to send."""
        if not self._talk.done:
            said = self._talk.take(data)
            return said + self._own() if self._talk.done else said
        if self._length is None:
            (self._length,) = _LENGTH.unpack(data)
            if not 0 < self._length <= MOST_CARD_BYTES:
                raise Refused(f"a card of {self._length} bytes")
        else:
            self.theirs, self.done = data, True
        return b""

    def _own(self) -> bytes:
        card = self._card()
        return _LENGTH.pack(len(card)) + card
