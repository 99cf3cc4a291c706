"""GPU-aware MPI with compressed collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.errors import (
    AgreementError,
    BufferSpecError,
    DeadlockError,
    DecodeError,
    DeviceError,
    FrameError,
    GpucompError,
    PeerError,
    RankFailedError,
    ScheduleError,
    SpecError,
)

if TYPE_CHECKING:
    from mpi_gpucomp.communicator import Communicator, Request
    from mpi_gpucomp.transport.rails import Rails

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "BufferSpecError",
    "Communicator",
    "DeadlockError",
    "DecodeError",
    "DeviceError",
    "FrameError",
    "GpucompError",
    "PeerError",
    "Rails",
    "RankFailedError",
    "Request",
    "ScheduleError",
    "SpecError",
]


def __getattr__(name: str) -> object:
    """Import what starts MPI only when it is asked for."""
    if name in ("Communicator", "Request"):
        from mpi_gpucomp import communicator as comm

        return getattr(comm, name)
    if name == "Rails":
        from mpi_gpucomp.transport import rails

        return rails.Rails
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
