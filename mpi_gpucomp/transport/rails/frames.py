"""What travels on a path: frames of a fixed header and a payload.

Most kinds have a place in the link's sequence, and arrive exactly once however often paths break. The others speak of
the path itself or of the pointers, hold for the moment, and are lost with the path.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = [
    "ACK",
    "ANNOUNCE",
    "BYE",
    "DATA",
    "EAGER",
    "GRANT",
    "HEADER_BYTES",
    "LETTER",
    "LOST",
    "MOST_BYTES",
    "PING",
    "STATE",
    "Header",
    "Item",
    "Payload",
    "broken",
]

Payload = bytes | bytearray | memoryview

DATA, EAGER, ANNOUNCE, GRANT, LETTER, BYE, LOST = range(1, 8)
"""In sequence: a piece of a message, a short message, word of a long one, room for it, a letter, goodbye, a loss."""
ACK, PING, STATE = range(8, 11)
"""Out of sequence: what has arrived, a question whether anybody is there, what was lost with a path."""

MOST_BYTES = 1 << 30
"""No payload is longer; whoever says so does not speak this protocol."""
_LAYOUT = struct.Struct("<BxxxIQQQQ")
HEADER_BYTES = _LAYOUT.size


class Header(NamedTuple):
    """What a frame begins with."""

    kind: int
    length: int
    """Bytes of the payload."""
    sequence: int
    acked: int
    """All that the peer has sent below this has arrived."""
    message: int = 0
    """A message's number; of EAGER and ANNOUNCE its tag."""
    offset: int = 0
    """Where in the message the payload goes; of ANNOUNCE the message's length."""

    @property
    def in_sequence(self) -> bool:
        """Say whether it has a place in the link's sequence."""
        return self.kind <= LOST

    def pack(self) -> bytes:
        """Return its bytes."""
        return _LAYOUT.pack(*self)

    @classmethod
    def read(cls, data: Payload) -> Header:
        """Read what `pack` has made; `broken` says whether it can be that."""
        return cls._make(_LAYOUT.unpack(data))


def broken(header: Header) -> bool:
    """Say whether a header cannot be one of ours."""
    return not DATA <= header.kind <= STATE or header.length > MOST_BYTES


class Item(NamedTuple):
    """What is to be sent in sequence, kept until the peer has it."""

    kind: int
    payload: Payload = b""
    message: int = 0
    offset: int = 0
    owner: object = None
    """Whom it concerns that it has arrived."""
