"""Broadcast of parameters from one rank to all: once, after every optimizer step, or on request.

Small tensors are packed into buckets. The transfer is lossless unless a lossy codec is selected.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any

import torch

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.codec.delta import Delta
from mpi_gpucomp.request import Request
from mpi_gpucomp.torch.backend import communicator_of
from mpi_gpucomp.torch.streams import current_streams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.utils.hooks import RemovableHandle

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.communicator import Communicator
    from mpi_gpucomp.torch.backend import Ranks

__all__ = ["ParameterSync", "broadcast_after_step", "sync_parameters"]

BUCKET_BYTES = 1 << 25
_sync_number = count()
"""Names the broadcasts of a sync: all ranks create their syncs in the same order."""


class ParameterSync:
    """Repeated broadcast of the same tensors."""

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
        """Prepare the broadcasts; all ranks pass their copies of the tensors in the same order.

        `codec` defaults to the communicator's codec for the role "parameters", then to a lossless one. codec="delta"
        sends the difference from the previous broadcast. With a lossy codec the root takes the decoded values too, so
        that all ranks hold identical ones, unless `exact_root` is set.
        """
        communicator = communicator_of(ranks)
        codec = _default_codec(communicator) if codec is None else codec
        name = f"parameters {next(_sync_number)}"
        buckets = enumerate(_into_buckets([tensor.detach() for tensor in tensors], bucket_bytes))
        self._buckets = [
            _Bucket(bucket, communicator, root, codec=codec, name=f"{name}, bucket {n}", replicate=not exact_root)
            for n, bucket in buckets
        ]

    def start(self) -> None:
        """Start the broadcasts; the tensors must not be used until `wait`."""
        for bucket in self._buckets:
            bucket.start()

    def wait(self) -> None:
        """Wait until all tensors hold the root's values."""
        Request.Waitall([bucket.request for bucket in self._buckets])
        for bucket in self._buckets:
            bucket.unpack()

    def __call__(self) -> None:
        """Broadcast the root's values and wait."""
        self.start()
        self.wait()

    def close(self) -> None:
        """Free the requests and their buffers."""
        for bucket in self._buckets:
            bucket.request.Free()


class _Bucket:
    """Tensors of one type and device, packed into one buffer; a single contiguous tensor is sent in place."""

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
        in_place = len(tensors) == 1 and tensors[0].is_contiguous()
        self._is_root, self._replicate = communicator.rank == root, replicate
        ends = list(accumulate(tensor.numel() for tensor in tensors))
        flat = tensors[0].view(-1) if in_place else tensors[0].new_empty(ends[-1])
        self._tensors: list[torch.Tensor] = [] if in_place else tensors
        self._flat = flat
        spans = zip(self._tensors, ends, strict=False)
        self._views = [flat[end - tensor.numel() : end].view(tensor.shape) for tensor, end in spans]
        self.request = communicator.Bcast_init(
            flat, root, codec=_codec_for(flat, codec), name=name, replicate=replicate
        )

    def start(self) -> None:
        """Pack the root's tensors and start the broadcast."""
        if self._is_root and self._tensors:
            torch._foreach_copy_(self._views, self._tensors)
            self._keep_for_current_stream()
        self.request.Start()

    def unpack(self) -> None:
        """Copy received values into the tensors."""
        if self._tensors and (self._replicate or not self._is_root):
            torch._foreach_copy_(self._tensors, self._views)
            self._keep_for_current_stream()

    def _keep_for_current_stream(self) -> None:
        """Let torch keep the memory, once it is freed, until the current stream no longer uses it."""
        for stream in current_streams(self._flat):
            self._flat.record_stream(stream)


def _default_codec(communicator: Communicator) -> str | Codec:
    """Return the codec of the role "parameters", or the communicator's default codec if that is lossless."""
    default = communicator.codec_for()
    return communicator.codec_for("parameters") or (default if default and default.lossless else "auto")


def _codec_for(tensor: torch.Tensor, codec: str | Codec) -> str | Codec:
    """Return the codec if it supports the element type, otherwise "none"."""
    dtypes = Delta.dtypes if codec == "delta" else get_codec(codec).dtypes
    return codec if str(tensor.dtype).removeprefix("torch.") in dtypes else "none"


def _into_buckets(tensors: Iterable[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield buckets of tensors of one type and device, of at most `bucket_bytes` unless a single tensor is larger."""
    filling: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        key = tensor.dtype, tensor.device
        if filling[key] and sum(other.nbytes for other in filling[key]) + tensor.nbytes > bucket_bytes:
            yield filling.pop(key)
        filling[key].append(tensor)
    yield from filling.values()


def sync_parameters(
    module: torch.nn.Module,
    root: int = 0,
    codec: str | Codec | None = None,
    ranks: Ranks = None,
    *,
    buffers: bool = True,
    exact_root: bool = False,
) -> None:
    """Broadcast the parameters and buffers of a module once; see `ParameterSync` for the arguments."""
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
    """Broadcast the root's parameters after every optimizer step, until the returned handle is removed."""
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sync = ParameterSync(tensors, root, codec, ranks, exact_root=exact_root)
    return optimizer.register_step_post_hook(lambda optimizer, args, kwargs: sync())
