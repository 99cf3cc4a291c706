"""What a codec is: it turns the elements of a buffer into fewer bytes and back, on a stream.

Nothing here waits. `encode` and `decode` queue their work and return a `Pending`, whose answer (how many bytes, or what
was wrong) is there once the stream has passed it. Encoded bytes mean the same on every machine: equal wire ids decode
each other's bytes, host and GPU alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from mpi_gpucomp.errors import BufferSpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from mpi_gpucomp.device.base import DType, Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer

__all__ = ["OPS", "Codec", "Pending"]

OPS = {"replace": 0, "sum": 1, "prod": 2, "min": 3, "max": 4}
"""What decoding does with the values already there, and the number that kernels know it by."""


class Pending:
    """The answer of queued work, there once its stream has come so far."""

    def __init__(self, done: Callable[[], bool], answer: Callable[[], int | None]) -> None:
        """Ask `done` without waiting; `answer` waits, and may raise. It is asked once."""
        self._done, self._answer = done, answer
        self._settled = False
        self._size: int | None = None
        self._error: Exception | None = None

    def done(self) -> bool:
        """Say whether the answer is there; never waits."""
        return self._settled or self._done()

    def result(self) -> int | None:
        """Wait, then return the bytes written: None where the codec cannot hold this data and it must travel raw."""
        if not self._settled:
            try:
                self._size = self._answer()
            except Exception as error:
                self._error = error
            self._settled = True
        if self._error is not None:
            raise self._error
        return self._size


class Codec(ABC):
    """One way to encode, with its parameters fixed."""

    name: ClassVar[str]
    """The word that starts the spec string."""

    lossless: ClassVar[bool]
    """Whether decoding gives back every bit."""

    dtypes: ClassVar[tuple[str, ...]]
    """Names of the element types that it takes."""

    shared: ClassVar[bool] = True
    """Whether one with an equal spec can stand in for it."""

    @property
    @abstractmethod
    def spec(self) -> str:
        """The spec string, in its one canonical form."""

    @property
    @abstractmethod
    def wire_id(self) -> int:
        """32 bits that name the format of the bytes: another format, another id."""

    @abstractmethod
    def max_encoded(self, count: int, dtype: DType) -> int:
        """Bytes that an encoding of `count` elements never exceeds: the capacity that `encode` needs."""

    def encoded_size(self, count: int, dtype: DType) -> int | None:
        """Bytes of an encoding of `count` elements where that is fixed, else None."""
        return None

    @abstractmethod
    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the encoding of `source` into `to`, which holds at least `max_encoded` bytes."""

    @abstractmethod
    def decode(self, source: Memory, nbytes: int, to: Buffer, stream: Stream) -> Pending:
        """Queue the decoding of `nbytes` of `source` into `to`."""

    @abstractmethod
    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        """Queue the decoding of `source` and its reduction into `to`: to = to op decoded (`op` one of OPS)."""

    def choose(self, source: Buffer, stream: Stream) -> Generator[Callable[[], bool], None, Codec]:
        """Choose the codec that `source` is to be encoded by, whose wire id its frame will have: this one, by default.

        A generator that yields what it waits for, if anything, and returns the codec.
        """
        yield from ()
        return self

    def decoder(self, wire_id: int) -> Codec:
        """Return the codec for bytes with this wire id; this one, by default, also where it cannot read them."""
        return self

    def tolerates_damage(self, stream: Stream) -> bool:
        """Say whether damaged bytes are safe to decode on this stream: an error or wrong values, and no worse."""
        return True

    def check_dtype(self, dtype: DType) -> None:
        """Raise if the codec does not take elements of this type."""
        if dtype.name not in self.dtypes:
            raise BufferSpecError(
                f"codec {self.spec}",
                expected=f"elements of type {' or '.join(self.dtypes)}",
                got=str(dtype),
                remedy="Choose a codec for this type: 'python -m mpi_gpucomp codecs' lists them.",
            )

    def check_capacity(self, source: Buffer, to: Memory) -> None:
        """Raise if an encoding of `source` might not fit."""
        needed = self.max_encoded(source.count, source.dtype)
        if to.nbytes < needed:
            raise BufferSpecError(
                f"codec {self.spec}",
                expected=f"room for {needed} encoded bytes",
                got=f"{to.nbytes}",
                remedy="Take as many bytes as max_encoded says.",
            )

    def check_operation(self, op: str, dtype: DType) -> None:
        """Raise if elements of this type have no such operation."""
        missing = {"c": ("min", "max"), "b": ("sum",)}.get(dtype.kind, ())
        known = [name for name in OPS if name not in missing]
        if op not in known:
            raise BufferSpecError(
                f"codec {self.spec}",
                expected=f"an operation that {dtype} has: {', '.join(known)}",
                got=op,
                remedy="Choose another operation, or elements of another type.",
            )

    def __repr__(self) -> str:
        """Show the spec."""
        return f"<codec {self.spec}>"
