"""Tensors as a Communicator takes them: elements one behind the other, of a type that it knows, never copied if so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mpi_gpucomp.device import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["elements", "flat", "joined", "part_out", "settle"]

KNOWN = frozenset(getattr(torch, dtype.name) for dtype in DTYPES)
NUMPY = KNOWN - {torch.bfloat16}


def flat(tensor: Tensor) -> Tensor:
    """Return the elements in one row: the same memory, or a copy of a tensor with gaps."""
    row = tensor.detach()
    if row.is_conj() or row.is_neg() or not row.is_contiguous():
        row = row.resolve_conj().resolve_neg().contiguous()
    row = row.view(-1)
    return row if row.dtype in KNOWN else row.view(torch.uint8)


def elements(row: Tensor) -> Any:
    """Return a row as whatever gets a Communicator to its elements soonest."""
    return row.numpy() if row.dtype in NUMPY and row.device.type == "cpu" else row


def settle(tensor: Tensor, row: Tensor) -> None:
    """Bring back what has arrived in the row of a tensor, if that was a copy."""
    if row.data_ptr() != tensor.data_ptr() and row.numel():
        with torch.no_grad():
            tensor.detach().copy_(row.view(tensor.dtype).view(tensor.shape))


def joined(tensors: Sequence[Tensor], *, filled: bool = True) -> Tensor:
    """Return one row for many tensors of one type, with their elements or only room for them."""
    rows = [flat(tensor) for tensor in tensors]
    if filled:
        return torch.cat(rows) if len(rows) > 1 else rows[0].clone()
    return rows[0].new_empty(sum(row.numel() for row in rows))


def part_out(row: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a row that was made by `joined` to the tensors."""
    start = 0
    with torch.no_grad():
        for tensor in tensors:
            count = tensor.numel() * tensor.element_size() // row.element_size()
            part = row[start : start + count]
            tensor.detach().copy_(part.view(tensor.dtype).view(tensor.shape))
            start += count
