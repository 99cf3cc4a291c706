"""A backend of torch.distributed whose collectives travel compressed: init_process_group("gpucomp") under mpirun.

Beside it, what works with any backend: a hook for DDP's gradients, and parameters from one rank to all. Importing this
registers the backend, and starts neither MPI nor anything else; that is done when the first group is made.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mpi_gpucomp.torch.register import register

if TYPE_CHECKING:
    from mpi_gpucomp.torch.backend import GpucompProcessGroup, Options
    from mpi_gpucomp.torch.hooks import HookState, gpucomp_hook
    from mpi_gpucomp.torch.sync import ParameterSync, broadcast_after_step, sync_parameters

__all__ = [
    "GpucompProcessGroup",
    "HookState",
    "Options",
    "ParameterSync",
    "broadcast_after_step",
    "gpucomp_hook",
    "sync_parameters",
]

_HOMES = {
    "GpucompProcessGroup": "backend",
    "HookState": "hooks",
    "Options": "backend",
    "ParameterSync": "sync",
    "broadcast_after_step": "sync",
    "gpucomp_hook": "hooks",
    "sync_parameters": "sync",
}
"""Where each public name is defined; imported when it is asked for."""


def __getattr__(name: str) -> object:
    """Import what starts MPI only when it is asked for."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
