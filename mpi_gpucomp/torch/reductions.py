"""torch's reductions in terms of MPI's: what is done to the elements before, by MPI, and after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Reduction", "reduction"]

_Kind: Any = ReduceOp.RedOpType  # torch's stub knows none of its members
SUMS = (_Kind.SUM, _Kind.AVG, _Kind.PREMUL_SUM)
OPERATIONS = {
    _Kind.SUM: MPI.SUM,
    _Kind.AVG: MPI.SUM,
    _Kind.PREMUL_SUM: MPI.SUM,
    _Kind.PRODUCT: MPI.PROD,
    _Kind.MIN: MPI.MIN,
    _Kind.MAX: MPI.MAX,
    _Kind.BAND: MPI.BAND,
    _Kind.BOR: MPI.BOR,
    _Kind.BXOR: MPI.BXOR,
}
TRUTHS = {
    _Kind.SUM: MPI.MAX,
    _Kind.MAX: MPI.MAX,
    _Kind.BOR: MPI.MAX,
    _Kind.PRODUCT: MPI.MIN,
    _Kind.MIN: MPI.MIN,
    _Kind.BAND: MPI.MIN,
    _Kind.BXOR: MPI.BXOR,
}
"""On bool, as bytes of 0 and 1: a sum is true if any is."""
BITWISE = (_Kind.BAND, _Kind.BOR, _Kind.BXOR)


class Reduction(NamedTuple):
    """One reduction of elements of one type among so many ranks."""

    op: MPI.Op
    factor: Any
    """What each rank's elements are multiplied by first; None if by nothing."""
    divisor: int
    """What the sums are divided by at the end; 1 if by nothing."""

    def before(self, row: Tensor) -> Tensor:
        """Return what MPI works on: the row itself, or a copy of it that was multiplied."""
        row = row.view(torch.uint8) if row.dtype is torch.bool else row
        return row if self.factor is None else (row * self.factor).to(row.dtype)

    def after(self, row: Tensor) -> None:
        """Finish the result in place."""
        if self.divisor != 1:
            row.div_(self.divisor, rounding_mode=None if row.is_floating_point() or row.is_complex() else "trunc")


def reduction(op: Any, dtype: torch.dtype, size: int) -> Reduction:
    """Read one of torch's; raise what torch's own backends raise where it makes no sense."""
    kind = getattr(op, "op", op)
    integral = not (dtype.is_floating_point or dtype.is_complex)
    table = TRUTHS if dtype is torch.bool else OPERATIONS
    if kind not in table or (kind in BITWISE and not integral):
        raise ValueError(f"Cannot use ReduceOp.{kind.name} with {dtype}")
    factor = op.factor if kind == _Kind.PREMUL_SUM else None
    return Reduction(table[kind], factor, size if kind == _Kind.AVG else 1)
