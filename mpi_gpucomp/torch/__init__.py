"""PyTorch: the torch.distributed backend `gpucomp`, and helpers for training with any backend.

Importing this package registers the backend and lets `init_process_group("gpucomp")` run under mpirun without
MASTER_ADDR. It also sets LOCAL_RANK there. MPI is not initialised before the first process group.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mpi_gpucomp._torch_plugin import register
from mpi_gpucomp.torch.rendezvous import register_rendezvous, set_local_rank

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

_MODULES = {
    "GpucompProcessGroup": "backend",
    "HookState": "hooks",
    "Options": "backend",
    "ParameterSync": "sync",
    "broadcast_after_step": "sync",
    "gpucomp_hook": "hooks",
    "sync_parameters": "sync",
}
"""The module of each public name, imported on first use because it initialises MPI."""


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
register_rendezvous()
set_local_rank()
