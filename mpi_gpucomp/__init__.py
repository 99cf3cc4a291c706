"""GPU-aware MPI with compressed collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.errors import (
    AgreementError,
    BufferError,
    DeviceError,
    FrameError,
    GpucompError,
    ScheduleError,
    SpecError,
    StreamError,
)

if TYPE_CHECKING:
    from mpi_gpucomp.comm import Communicator

__all__ = [
    "AgreementError",
    "BufferError",
    "Communicator",
    "DeviceError",
    "FrameError",
    "GpucompError",
    "ScheduleError",
    "SpecError",
    "StreamError",
]


def __getattr__(name: str) -> object:
    """Import what starts MPI only when it is asked for."""
    if name == "Communicator":
        from mpi_gpucomp.comm import Communicator

        return Communicator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
