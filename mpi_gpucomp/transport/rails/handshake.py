"""How the two ends of a new connection prove to each other that they belong to the job.

Whoever dials says who it is, with a number that was never used before (a nonce). Whoever is called answers with a nonce
of its own and a proof that it knows the job's secret; the dialler checks it and proves the same. Each proof covers all
that was said before, so that none can be used again. A stranger can send no more than a hello and a wrong proof, of
fixed lengths, before the connection is closed. What follows on the connection is not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import NamedTuple

__all__ = ["SECRET_BYTES", "Answering", "Dialling", "Hello", "Refused"]

MAGIC = b"GPCRAIL1"
SECRET_BYTES = NONCE_BYTES = PROOF_BYTES = 32
_HELLO = struct.Struct(f"<8sIIIIQ{NONCE_BYTES}s")
HELLO_BYTES, ANSWER_BYTES = _HELLO.size, NONCE_BYTES + PROOF_BYTES


class Refused(Exception):
    """The other end does not belong to the job, or not here; the text says why."""


class Hello(NamedTuple):
    """Who dials whom, on which rail, and for which time."""

    caller: int
    called: int
    rail: int
    generation: int


def _proof(secret: bytes, who: bytes, *said: bytes) -> bytes:
    return hmac.digest(secret, who + b"".join(said), "sha256")


class Dialling:
    """The end that has dialled: `wants` so many bytes, takes them, and returns what to send."""

    wants, calls = ANSWER_BYTES, True

    def __init__(self, secret: bytes, hello: Hello) -> None:
        """Begin; `first` is to be sent."""
        self._secret, self.hello, self.done = secret, hello, False
        self.first = _HELLO.pack(MAGIC, *hello, 0, secrets.token_bytes(NONCE_BYTES))

    def take(self, answer: bytes) -> bytes:
        """Check the answer, and return our proof."""
        nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"called", self.first, nonce)):
            raise Refused("whoever answers does not know the job's secret")
        self.done = True
        return _proof(self._secret, b"caller", self.first, answer)


class Answering:
    """The end that was called."""

    first, calls = b"", False

    def __init__(self, secret: bytes, rank: int, rail: int) -> None:
        """Listen for a hello of a rank below this one, on this rail."""
        self._secret, self._rank, self._rail = secret, rank, rail
        self.wants, self.done = HELLO_BYTES, False
        self.hello: Hello | None = None
        self._said = b""

    def take(self, data: bytes) -> bytes:
        """Check a hello and return an answer, or check the proof that follows."""
        if self.hello is None:
            self.hello, self.wants = self._read(data), PROOF_BYTES
            nonce = secrets.token_bytes(NONCE_BYTES)
            answer = nonce + _proof(self._secret, b"called", data, nonce)
            self._said = data + answer
            return answer
        if not hmac.compare_digest(data, _proof(self._secret, b"caller", self._said)):
            raise Refused("whoever calls does not know the job's secret")
        self.done = True
        return b""

    def _read(self, data: bytes) -> Hello:
        magic, *numbers, _, _ = _HELLO.unpack(data)
        hello = Hello(*numbers)
        if magic != MAGIC:
            raise Refused("not a hello of this protocol")
        if hello.called != self._rank or hello.rail != self._rail or hello.caller >= self._rank:
            raise Refused(f"a hello for somebody else: {hello}")
        return hello
