"""Parameters from one rank to all: once, after every step of an optimizer, or whenever somebody says so.

Many small tensors travel in one bucket. Unless a codec is asked for, what arrives is what was sent, bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any

import torch

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.codec.delta import Delta
from mpi_gpucomp.communicator import Request
from mpi_gpucomp.torch.collectives import communicator_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.utils.hooks import RemovableHandle

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.communicator import Communicator
    from mpi_gpucomp.torch.collectives import Ranks

__all__ = ["ParameterSync", "broadcast_after_step", "sync_parameters"]

BUCKET_BYTES = 1 << 25
_numbers = count()
"""All ranks make their syncs in the same order, so that those of one number belong together."""


class ParameterSync:
    """The same tensors, broadcast again and again."""

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        root: int = 0,
        codec: str | Codec | None = None,
        ranks: Ranks = None,
        *,
        exact_root: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Let all ranks name their copies of the tensors, in the same order.

        Without a `codec` it is the one that the communicator has for the role "parameters", or else a lossless one.
        codec="delta" sends what has changed since the last time. With a lossy one the root too takes what is decoded,
        so that all ranks have the same, unless `exact_root` says that it keeps its own.
        """
        communicator = communicator_of(ranks)
        codec = _codec(communicator) if codec is None else codec
        name = f"parameters {next(_numbers)}"
        parts = enumerate(_divided([tensor.detach() for tensor in tensors], bucket_bytes))
        self._buckets = [
            _Bucket(part, communicator, root, codec=codec, name=f"{name}, bucket {n}", replicate=not exact_root)
            for n, part in parts
        ]

    def start(self) -> None:
        """Start to send the root's values; the tensors are not to be touched until `wait`."""
        for bucket in self._buckets:
            bucket.start()

    def wait(self) -> None:
        """Wait until all tensors have the root's values."""
        Request.Waitall([bucket.request for bucket in self._buckets])
        for bucket in self._buckets:
            bucket.unpack()

    def __call__(self) -> None:
        """Send the root's values to all, and wait."""
        self.start()
        self.wait()

    def close(self) -> None:
        """Let go of the memory."""
        for bucket in self._buckets:
            bucket.request.Free()


class _Bucket:
    """Tensors of one type and device, side by side in memory that is sent as one; a single one is sent from its own."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        communicator: Communicator,
        root: int,
        *,
        codec: str | Codec,
        name: str,
        replicate: bool,
    ) -> None:
        alone = len(tensors) == 1 and tensors[0].is_contiguous()
        self._is_root, self._replicate = communicator.rank == root, replicate
        ends = list(accumulate(tensor.numel() for tensor in tensors))
        flat = tensors[0].view(-1) if alone else tensors[0].new_empty(ends[-1])
        self._tensors: list[torch.Tensor] = [] if alone else tensors
        shares = zip(self._tensors, ends, strict=False)
        self._places = [flat[end - tensor.numel() : end].view(tensor.shape) for tensor, end in shares]
        self.request = communicator.Bcast_init(flat, root, codec=_fitting(codec, flat), name=name, replicate=replicate)

    def start(self) -> None:
        """Collect the root's values and start to send them."""
        if self._is_root and self._tensors:
            torch._foreach_copy_(self._places, self._tensors)
        self.request.Start()

    def unpack(self) -> None:
        """Put what has arrived where it belongs."""
        if self._tensors and (self._replicate or not self._is_root):
            torch._foreach_copy_(self._tensors, self._places)


def _codec(communicator: Communicator) -> str | Codec:
    """Return the codec for parameters; one that was meant for everything must be lossless to be meant for them."""
    general = communicator.codec_for()
    return communicator.codec_for("parameters") or (general if general and general.lossless else "auto")


def _fitting(codec: str | Codec, tensor: torch.Tensor) -> str | Codec:
    """Return the codec, or none where it does not take elements such as counters."""
    taken = Delta.dtypes if codec == "delta" else get_codec(codec).dtypes
    return codec if str(tensor.dtype).removeprefix("torch.") in taken else "none"


def _divided(tensors: Iterable[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Divide tensors into buckets of one type and device, none larger than allowed unless it is a single tensor."""
    open_: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        if sum(other.nbytes for other in open_[kind]) + tensor.nbytes > bucket_bytes and open_[kind]:
            yield open_.pop(kind)
        open_[kind].append(tensor)
    yield from open_.values()


def sync_parameters(
    module: torch.nn.Module,
    root: int = 0,
    codec: str | Codec | None = None,
    ranks: Ranks = None,
    *,
    buffers: bool = True,
    exact_root: bool = False,
) -> None:
    """Give all ranks the root's parameters, and its buffers; lossless unless a codec is asked for."""
    tensors = [*module.parameters(), *(module.buffers() if buffers else ())]
    sync = ParameterSync(tensors, root, codec, ranks, exact_root=exact_root)
    sync()
    sync.close()


def broadcast_after_step(
    optimizer: torch.optim.Optimizer,
    root: int = 0,
    codec: str | Codec | None = None,
    ranks: Ranks = None,
    *,
    exact_root: bool = False,
) -> RemovableHandle:
    """Give all ranks the root's parameters after every step of an optimizer, until the handle is removed."""
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sync = ParameterSync(tensors, root, codec, ranks, exact_root=exact_root)
    return optimizer.register_step_post_hook(lambda optimizer, args, kwargs: sync())
