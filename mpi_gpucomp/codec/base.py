"""The codec contract: encode the elements of a buffer into fewer bytes and decode them, on a stream.

Nothing here blocks. `encode` and `decode` queue their work and return a `Pending`, whose result (the encoded size, or
an error) is available once the stream has completed the work. The encoded bytes are the same on host and GPU, and
codecs with equal wire ids decode each other's bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from mpi_gpucomp.errors import BufferSpecError, DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from mpi_gpucomp.device.base import DType, Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer

__all__ = ["OPS", "Codec", "Pending", "require_package"]

OPS = {"replace": 0, "sum": 1, "prod": 2, "min": 3, "max": 4}
"""The operations that combine decoded values with those in the target buffer, and their kernel codes."""


class Pending:
    """The result of queued work, available once its stream has completed it."""

    def __init__(self, done: Callable[[], bool], result: Callable[[], int | None]) -> None:
        """Poll `done`, which never blocks; `result` blocks and may raise, and is called at most once."""
        self._done, self._get_result = done, result
        self._completed = False
        self._size: int | None = None
        self._error: Exception | None = None

    def done(self) -> bool:
        """Return True if the result is available; never blocks."""
        return self._completed or self._done()

    def result(self) -> int | None:
        """Block until completion and return the bytes written; None if the codec cannot represent this data."""
        if not self._completed:
            try:
                self._size = self._get_result()
            except Exception as error:
                self._error = error
            self._completed = True
        if self._error is not None:
            raise self._error
        return self._size


class Codec(ABC):
    """An encoding with fixed parameters."""

    name: ClassVar[str]
    """The name that starts the spec string."""

    lossless: ClassVar[bool]
    """True if decoding restores every bit."""

    dtypes: ClassVar[tuple[str, ...]]
    """Names of the supported element types."""

    shared: ClassVar[bool] = True
    """True if codecs with equal specs are interchangeable; False for those with state."""

    @property
    @abstractmethod
    def spec(self) -> str:
        """The spec string in canonical form."""

    @property
    @abstractmethod
    def wire_id(self) -> int:
        """32-bit id of the encoded format; a changed format has a new id."""

    @abstractmethod
    def max_encoded(self, count: int, dtype: DType) -> int:
        """Return an upper bound for the bytes of an encoding: the capacity that `encode` needs."""

    def encoded_size(self, count: int, dtype: DType) -> int | None:
        """Return the bytes of an encoding if they depend only on count and type, else None."""
        return None

    @abstractmethod
    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the encoding of `source` into `to`, which holds at least `max_encoded` bytes."""

    @abstractmethod
    def decode(self, source: Memory, nbytes: int, to: Buffer, stream: Stream) -> Pending:
        """Queue the decoding of `nbytes` of `source` into `to`."""

    @abstractmethod
    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        """Queue the decoding of `source` and its reduction into `to`: to = to op decoded, with `op` in OPS."""

    def choose(self, source: Buffer, stream: Stream) -> Generator[Callable[[], bool], None, Codec]:
        """Choose the codec for `source`, whose wire id its frame carries; this one, by default.

        A generator: it yields a `done` function for each condition that it waits for, and returns the codec.
        """
        yield from ()
        return self

    def decoder(self, wire_id: int) -> Codec:
        """Return the codec that decodes this wire id; this one, by default, even if the ids differ."""
        return self

    def tolerates_damage(self, stream: Stream) -> bool:
        """Return True if decoding damaged bytes is safe on this stream: an error or wrong values, no invalid access."""
        return True

    def check_dtype(self, dtype: DType) -> None:
        """Raise if the codec does not support elements of this type."""
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
                expected=f"capacity for {needed} encoded bytes",
                got=f"{to.nbytes}",
                remedy="Allocate max_encoded bytes.",
            )

    def check_operation(self, op: str, dtype: DType) -> None:
        """Raise if the operation is not defined for elements of this type."""
        undefined = {"c": ("min", "max"), "b": ("sum",)}.get(dtype.kind, ())
        known = [name for name in OPS if name not in undefined]
        if op not in known:
            raise BufferSpecError(
                f"codec {self.spec}",
                expected=f"an operation defined for {dtype}: {', '.join(known)}",
                got=op,
                remedy="Choose another operation, or elements of another type.",
            )

    def __repr__(self) -> str:
        """Show the spec."""
        return f"<codec {self.spec}>"


def require_package(package: str, topic: str, remedy: str) -> Any:
    """Import an optional package, or raise an error about `topic` with instructions to install it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise DeviceError(topic, expected=f"the package {package}", got=str(error), remedy=remedy) from error
