"""Every error of the library, in one tree.

    GpucompError
    ├── SpecError        invalid codec spec, option or setting                    (also a ValueError)
    ├── BufferSpecError  unsuitable buffer: dtype, device, layout or size         (also a TypeError)
    ├── DeviceError      missing or failed device, library or driver              (also a RuntimeError)
    ├── DecodeError      bytes that the codec cannot decode                       (also a ValueError)
    ├── FrameError       frame with an invalid header, length or checksum         (also a ValueError)
    ├── ControlMessageError  malformed control message, or another version       (also a ValueError)
    ├── ScheduleError    schedule that cannot be read or fails verification       (also a ValueError)
    ├── AgreementError   ranks called a collective with different arguments       (also a ValueError)
    ├── PeerError        collective failed on another rank                        (also a RuntimeError)
    ├── DeadlockError    ranks wait for each other, or for one that never joins   (also a TimeoutError)
    └── RankFailedError  rank died, or the network to it failed                   (also a ConnectionError)

Each has a topic, what was expected, what it got, a remedy, and the rank if known. In a program that has imported
mpi4py.MPI each is an MPI.Exception too, with an error class of MPI; modules without MPI raise the same errors.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, ClassVar

__all__ = [
    "AgreementError",
    "BufferSpecError",
    "ControlMessageError",
    "DeadlockError",
    "DecodeError",
    "DeviceError",
    "FrameError",
    "GpucompError",
    "PeerError",
    "RankFailedError",
    "ScheduleError",
    "SpecError",
]


class GpucompError(Exception):
    """Base class of all errors: topic, expected, got, remedy and rank."""

    mpi_class: ClassVar[str] = "ERR_OTHER"
    """The name of its error class in mpi4py.MPI."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an error that `except MPI.Exception` catches, if there is MPI."""
        exception = getattr(sys.modules.get("mpi4py.MPI"), "Exception", None)
        # Without arguments: an OSError takes no keywords.
        kind: Any = cls
        return super().__new__(kind if exception is None or issubclass(kind, exception) else _as_mpi(kind, exception))

    def __init__(self, topic: str, *, expected: str, got: str, remedy: str, rank: int | None = None) -> None:
        """Store the parts as attributes, and join them to the message."""
        self.topic, self.expected, self.got, self.remedy, self.rank = topic, expected, got, remedy, rank
        where = "" if rank is None else f"rank {rank}: "
        self.args = (f"{where}{topic}: expected {expected}, got {got}. {remedy}",)

    def __str__(self) -> str:
        """Return the message."""
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        """Let pickle and copy make the error again from its parts."""
        kind = getattr(self, "_kind", type(self))
        return _remake, (kind, self.topic, self.expected, self.got, self.remedy, self.rank)


def _remake(kind: type[GpucompError], topic: str, expected: str, got: str, remedy: str, rank: int | None) -> Any:
    return kind(topic, expected=expected, got=got, remedy=remedy, rank=rank)


class _MpiError(GpucompError):
    """Replaces those of mpi4py's methods that expect the number of an error where ours have a message."""

    def __int__(self) -> int:
        """Return the error class: there is no code beyond that."""
        mpi: Any = sys.modules["mpi4py.MPI"]
        return int(getattr(mpi, self.mpi_class, mpi.ERR_OTHER))

    def Get_error_string(self) -> str:
        """Return the message."""
        return str(self)

    error_string = property(Get_error_string)
    __repr__ = Exception.__repr__


@cache
def _as_mpi(kind: type[GpucompError], exception: type[Exception]) -> type[GpucompError]:
    """Return the class of errors of a kind that are MPI's too, under the same name."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_MpiError, kind, exception), {**names, "_kind": kind})


class SpecError(GpucompError, ValueError):
    """A codec spec, option or setting that does not parse or is out of range."""

    mpi_class = "ERR_ARG"


class BufferSpecError(GpucompError, TypeError):
    """A buffer that is unsuitable for the call."""

    mpi_class = "ERR_BUFFER"


class DeviceError(GpucompError, RuntimeError):
    """A device, library or driver that is missing or failed."""


class DecodeError(GpucompError, ValueError):
    """Bytes that are not a valid encoding of their codec."""


class FrameError(GpucompError, ValueError):
    """A frame with an invalid header, length, sequence number or checksum."""


class ControlMessageError(GpucompError, ValueError):
    """A control message that is malformed, too long, or of another version."""


class ScheduleError(GpucompError, ValueError):
    """A schedule that cannot be built or read, or that fails verification."""

    mpi_class = "ERR_ARG"


class AgreementError(GpucompError, ValueError):
    """Ranks called a collective with different arguments; raised on every rank."""

    mpi_class = "ERR_ARG"


class PeerError(GpucompError, RuntimeError):
    """A collective failed on another rank; names the rank and the cause."""


class DeadlockError(GpucompError, TimeoutError):
    """Ranks wait for each other in a cycle, or for a rank that does not join; raised on every rank."""


class RankFailedError(GpucompError, ConnectionError):
    """A rank died, or the network no longer reaches it."""

    mpi_class = "ERR_PROC_FAILED"
