"""Tells torch.distributed of the backend, of mpi:// and of where its own functions know only backends by name."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NAME", "autoload", "register"]

NAME = "gpucomp"
DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Make the backend known, once."""
    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _make, extended_api=True, devices=list(DEVICES))
    register_rendezvous_handler("mpi", _meet)  # type: ignore[no-untyped-call]
    _without_master_address()
    _let_groups_monitor()


def _make(seen: Any, options: Any) -> Any:
    from mpi_gpucomp.torch.backend import make

    return make(seen, options)


def _meet(url: str, **rest: Any) -> Iterator[tuple[Any, int, int]]:
    from mpi_gpucomp.torch.rendezvous import meet

    return meet(url, **rest)


def _without_master_address() -> None:
    """Let env://, which is what no init_method means, be mpi:// where nobody has set MASTER_ADDR."""
    by_environment = _rendezvous_handlers["env"]

    @wraps(by_environment)
    def meet(url: str, **rest: Any) -> Iterator[tuple[Any, int, int]]:
        given = "MASTER_ADDR" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
        return by_environment(url, **rest) if given else _meet(url, **rest)

    _rendezvous_handlers["env"] = meet


def _let_groups_monitor() -> None:
    """Let torch.distributed.monitored_barrier, which refuses all backends but gloo, ask our groups too."""
    refusing = distributed_c10d.monitored_barrier

    @wraps(refusing)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        used: Any = group if group is not None else distributed_c10d.GroupMember.WORLD
        if used is None or getattr(used, "backend_name", None) != NAME:
            return refusing(group, timeout, wait_all_ranks)
        limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        return used.monitored_barrier(limit, wait_all_ranks)

    distributed_c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier


# What `import torch` calls, by the entry point `torch.backends`.
#
# It stands in a file of its own: whoever imports mpi_gpucomp.torch first has torch call this in the middle of that.


def autoload() -> None:
    """Do nothing more: the import of the package, which came before this or is under way, registers the backend."""
