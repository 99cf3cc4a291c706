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

Each has a topic, what was expected, what it got, a remedy, and the rank if known.
"""

from __future__ import annotations

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

    def __init__(self, topic: str, *, expected: str, got: str, remedy: str, rank: int | None = None) -> None:
        """Store the parts as attributes, and join them to the message."""
        self.topic, self.expected, self.got, self.remedy, self.rank = topic, expected, got, remedy, rank
        where = "" if rank is None else f"rank {rank}: "
        super().__init__(f"{where}{topic}: expected {expected}, got {got}. {remedy}")


class SpecError(GpucompError, ValueError):
    """A codec spec, option or setting that does not parse or is out of range."""


class BufferSpecError(GpucompError, TypeError):
    """A buffer that is unsuitable for the call."""


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


class AgreementError(GpucompError, ValueError):
    """Ranks called a collective with different arguments; raised on every rank."""


class PeerError(GpucompError, RuntimeError):
    """A collective failed on another rank; names the rank and the cause."""


class DeadlockError(GpucompError, TimeoutError):
    """Ranks wait for each other in a cycle, or for a rank that does not join; raised on every rank."""


class RankFailedError(GpucompError, ConnectionError):
    """A rank died, or the network no longer reaches it."""
