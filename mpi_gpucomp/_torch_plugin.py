"""Entry point of the group `torch.backends`, which `import torch` calls: registers the backend by name.

It registers the backend `gpucomp` and the rendezvous scheme `mpi://`, and changes nothing else of torch. It is not part
of `mpi_gpucomp.torch`, so that loading it does not import that package, and it imports torch only when it is called:
a program may import `mpi_gpucomp.torch` first, and torch then calls it from within that import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BACKEND_NAME", "register"]

BACKEND_NAME = "gpucomp"
RENDEZVOUS_SCHEME = "mpi"


def register() -> None:
    """Register the backend and its rendezvous with torch.distributed, once."""
    import torch.distributed as dist

    if not dist.is_available() or BACKEND_NAME in dist.Backend.backend_list:
        return
    from torch.distributed.rendezvous import register_rendezvous_handler

    dist.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    register_rendezvous_handler(RENDEZVOUS_SCHEME, _rendezvous)  # type: ignore[no-untyped-call]


def _create(dist_options: Any, pg_options: Any) -> Any:
    return import_module("mpi_gpucomp.torch.backend").create(dist_options, pg_options)


def _rendezvous(url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
    handler: Iterator[tuple[Any, int, int]] = import_module("mpi_gpucomp.torch.rendezvous").rendezvous(url, **kwargs)
    return handler
