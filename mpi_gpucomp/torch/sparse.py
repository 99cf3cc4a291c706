"""Sums of sparse tensors: every rank hears of all elements, and adds them up in the order of the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from mpi_gpucomp.torch.collectives import all_gather

if TYPE_CHECKING:
    from torch import Tensor

    from mpi_gpucomp.comm import Communicator
    from mpi_gpucomp.comm.options import Options as How

__all__ = ["all_reduce_sparse"]


def all_reduce_sparse(comm: Communicator, how: How, tensor: Tensor, op: Any) -> None:
    """Add up the sparse tensors of all ranks, everywhere, in place."""
    if getattr(op, "op", op) != ReduceOp.SUM or tensor.layout is not torch.sparse_coo:
        raise ValueError(f"Cannot use {op} with {tensor.layout}: of sparse tensors there are sums of sparse_coo alone")
    with torch.no_grad():
        own = tensor.detach().coalesce()
        places, found = own.indices(), own.values()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(comm.size)]
        all_gather(comm, {}, counts, torch.tensor([found.shape[0]]))
        lengths = [int(count) for count in counts]
        all_places = [places.new_empty(places.shape[0], length) for length in lengths]
        all_found = [found.new_empty(length, *found.shape[1:]) for length in lengths]
        all_gather(comm, {}, all_places, places.contiguous())
        all_gather(comm, how, all_found, found.contiguous())
        whole = torch.sparse_coo_tensor(torch.cat(all_places, 1), torch.cat(all_found), tensor.shape).coalesce()
        tensor.copy_(whole)
