"""Every error of the library, in one tree.

    GpucompError
    ├── SpecError       a codec spec string (or another setting) that means nothing         (also a ValueError)
    ├── BufferError     a buffer that cannot be used as asked: dtype, device, layout, size  (also a TypeError)
    ├── DeviceError     a device, library or driver that is missing or failed               (also a RuntimeError)
    ├── StreamError     encoded bytes that are not a stream of the codec                     (also a ValueError)
    ├── FrameError      a frame whose header, length or checksum is wrong                    (also a ValueError)
    ├── ScheduleError   a schedule that cannot be read, or would not do what it promises     (also a ValueError)
    ├── AgreementError  ranks that called one collective in different ways                   (also a ValueError)
    ├── PeerError       a collective that went wrong on another rank                          (also a RuntimeError)
    ├── DeadlockError   ranks that wait for each other, or for one that never comes           (also a TimeoutError)
    └── RankFailedError a rank that died, or the network to it                                (also a ConnectionError)

Each says topic, expected, got and remedy, and the rank where one is known.
"""

from __future__ import annotations

__all__ = [
    "AgreementError",
    "BufferSpecError",
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
    """Base of all errors: a topic, what was expected, what was there instead, and what to do about it."""

    def __init__(self, topic: str, *, expected: str, got: str, remedy: str, rank: int | None = None) -> None:
        """Keep the parts apart, so that programs can read them and people get one sentence."""
        self.topic, self.expected, self.got, self.remedy, self.rank = topic, expected, got, remedy, rank
        where = "" if rank is None else f"rank {rank}: "
        super().__init__(f"{where}{topic}: expected {expected}, got {got}. {remedy}")


class SpecError(GpucompError, ValueError):
    """A codec spec or a setting that does not parse or is out of range."""


class BufferSpecError(GpucompError, TypeError):
    """A buffer that cannot be used as asked."""


class DeviceError(GpucompError, RuntimeError):
    """A device, library or driver that is missing or failed."""


class DecodeError(GpucompError, ValueError):
    """Encoded bytes that are not a valid stream of their codec."""


class FrameError(GpucompError, ValueError):
    """A frame with a wrong header, length, sequence or checksum."""


class ScheduleError(GpucompError, ValueError):
    """A schedule that cannot be built or read, or that fails its check."""


class AgreementError(GpucompError, ValueError):
    """Ranks that called one collective in different ways; every rank gets it."""


class PeerError(GpucompError, RuntimeError):
    """A collective that this rank did right and another one did not; it says who and what."""


class DeadlockError(GpucompError, TimeoutError):
    """Ranks that wait for each other in a circle, or for a rank that does not come; every rank gets it."""


class RankFailedError(GpucompError, ConnectionError):
    """A rank that died, or that the network no longer reaches."""
