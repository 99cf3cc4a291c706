"""Entry point of the group `torch.backends`, which `import torch` calls: registers the backend by name.

It registers the name `gpucomp`, and changes nothing else of torch. It is not part of `mpi_gpucomp.torch`, so that
loading it does not import that package, and it imports torch only when it is called: a program may import
`mpi_gpucomp.torch` first, and torch then calls it from within that import.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["BACKEND_NAME", "register"]

BACKEND_NAME = "gpucomp"


def register() -> None:
    """Register the backend with torch.distributed, once."""
    import torch.distributed as dist

    if dist.is_available() and BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(dist_options: Any, pg_options: Any) -> Any:
    return import_module("mpi_gpucomp.torch.backend").create(dist_options, pg_options)
