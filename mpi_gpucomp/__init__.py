"""GPU-aware MPI with compressed collectives."""

from __future__ import annotations

from importlib import import_module
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
    from mpi_gpucomp.communicator import Communicator
    from mpi_gpucomp.request import Request
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


_HOMES = {"Communicator": "communicator", "Rails": "transport.rails", "Request": "request"}
"""The modules of the names that start MPI."""


def __getattr__(name: str) -> object:
    """Import what starts MPI only when it is asked for."""
    if name in _HOMES:
        return getattr(import_module(f"mpi_gpucomp.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
