"""Error feedback: what a lossy codec took from a gradient is added to the next, so that nothing is lost for good."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from mpi_gpucomp.device import as_buffer, get_device, order_after
from mpi_gpucomp.device.host import HostDevice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.device import Stream

__all__ = ["ErrorFeedback"]

PIECE_BYTES = 1 << 21
"""What is encoded at a time: it stays in the cache, and a bound relative to a range sees one as long as a chunk's."""


class ErrorFeedback:
    """What each parameter's gradient still has to get."""

    def __init__(self) -> None:
        """Owe nothing."""
        self._owed: dict[tuple[int, ...], torch.Tensor] = {}
        self._owed_to: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By the identity of a parameter: the parameter, which must not go while its identity is used, and its share.

        DDP makes other buckets of the parameters after the first step, and what is owed goes with each to its new one.
        """

    def apply(self, codec: Codec, parameters: Sequence[torch.Tensor], gradient: torch.Tensor) -> None:
        """Add what is owed to a bucket's gradient, leave there what the codec makes of it, and owe the rest."""
        owed = self._of(parameters, gradient)
        owed.add_(gradient)
        for start in range(0, gradient.numel(), PIECE_BYTES // gradient.element_size()):
            part = slice(start, start + PIECE_BYTES // gradient.element_size())
            _coded(codec, owed[part], gradient[part])
        torch.sub(owed, gradient, out=owed)
        owed.nan_to_num_(0.0, 0.0, 0.0)  # where a gradient overflowed nothing is owed: infinity would stay for ever

    def _of(self, parameters: Sequence[torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
        key = tuple(map(id, parameters))
        if key not in self._owed:
            self._owed[key] = self._moved(parameters, gradient)
        return self._owed[key]

    def _moved(self, parameters: Sequence[torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
        """Make what is owed to a new bucket of what was owed to its parameters in others."""
        owed, start = torch.zeros_like(gradient), 0
        for parameter in parameters:
            share = owed[start : start + parameter.numel()]
            before = self._owed_to.get(id(parameter))
            if before is not None and before[1].numel() == share.numel():
                share.copy_(before[1])
            self._owed_to[id(parameter)] = parameter, share
            start += parameter.numel()
        kept = {share.untyped_storage().data_ptr() for _, share in self._owed_to.values()}
        self._owed = {key: old for key, old in self._owed.items() if old.untyped_storage().data_ptr() in kept}
        return owed


def _coded(codec: Codec, source: torch.Tensor, to: torch.Tensor) -> None:
    """Encode and decode; where the codec cannot hold the values they travel as they are."""
    values, result = as_buffer(source), as_buffer(to, writable=True)
    stream = _stream(values.device)
    order_after(values, stream)
    order_after(result, stream)
    with stream.device.alloc(codec.max_encoded(values.count, values.dtype)) as room:
        nbytes = codec.encode(values, room, stream).result()
        if nbytes is None:
            to.copy_(source)
        else:
            codec.decode(room, nbytes, result, stream).result()


@cache
def _stream(name: str) -> Stream:
    device = get_device(name)
    return device.stream(inline=True) if isinstance(device, HostDevice) else device.stream()
