"""GPU-aware MPI with compressed collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.errors import (
    AgreementError,
    BufferError,
    DeadlockError,
    DeviceError,
    FrameError,
    GpucompError,
    PeerError,
    RankFailedError,
    ScheduleError,
    SpecError,
    StreamError,
)

if TYPE_CHECKING:
    from mpi_gpucomp.comm import Communicator, Request
    from mpi_gpucomp.transport.rails import Rails

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "BufferError",
    "Communicator",
    "DeadlockError",
    "DeviceError",
    "FrameError",
    "GpucompError",
    "PeerError",
    "Rails",
    "RankFailedError",
    "Request",
    "ScheduleError",
    "SpecError",
    "StreamError",
]


def __getattr__(name: str) -> object:
    """Import what starts MPI only when it is asked for."""
    if name in ("Communicator", "Request"):
        from mpi_gpucomp import comm

        return getattr(comm, name)
    if name == "Rails":
        from mpi_gpucomp.transport import rails

        return rails.Rails
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
