"""Broadcast of parameters from one rank to all: once, after every optimizer step, or on request.

Small tensors are packed into buckets. The transfer is lossless unless a lossy codec is selected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary, finalize

import torch
from mpi4py import MPI

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.codec.delta import Delta
from mpi_gpucomp.communicator import Communicator
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.request import Request
from mpi_gpucomp.torch.backend import communicator_of, number_on
from mpi_gpucomp.torch.streams import current_streams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.utils.hooks import RemovableHandle

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.torch.backend import Ranks

Tensors: TypeAlias = "torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[torch.Tensor]"
"""A module (its parameters and buffers), a state_dict, or tensors."""

__all__ = ["ParameterSync", "broadcast_after_step", "sync_parameters"]

BUCKET_BYTES = 1 << 25


class ParameterSync:
    """Repeated broadcast of the same tensors."""

    def __init__(
        self,
        tensors: Tensors,
        root: int = 0,
        codec: str | Codec | None = None,
        ranks: Ranks = None,
        *,
        exact_root: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        name: str | None = None,
    ) -> None:
        """Prepare the broadcasts; all ranks pass their copies of the tensors in the same order.

        `tensors` may be a module, whose parameters and buffers are sent, or a state_dict. `codec` defaults to the
        communicator's codec for the role "parameters", then to a lossless one. codec="delta" sends the difference from
        the previous broadcast. With a lossy codec the root takes the decoded values too, so that all ranks hold
        identical ones, unless `exact_root` is set. `name` must be the same on all ranks; by default, syncs are numbered
        in order of creation.
        """
        communicator = communicator_of(ranks)
        codec = _default_codec(communicator) if codec is None else codec
        name = f"parameters {number_on(communicator, 'parameters')}" if name is None else name
        buckets = enumerate(_into_buckets(tensors_of(tensors, "ParameterSync"), bucket_bytes))
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


def tensors_of(given: Tensors, topic: str, *, buffers: bool = True) -> list[torch.Tensor]:
    """Return the tensors of a module, of a state_dict, or as they are given."""
    if isinstance(given, torch.nn.Module):
        return [tensor.detach() for tensor in (*given.parameters(), *(given.buffers() if buffers else ()))]
    named: Iterable[tuple[object, Any]]
    named = given.items() if isinstance(given, Mapping) else enumerate([given] if _is_tensor(given) else given)
    tensors = []
    for name, tensor in named:
        if not _is_tensor(tensor):
            raise SpecError(
                topic,
                expected="a module, a state_dict of tensors, or tensors",
                got=f"{type(tensor).__qualname__} at {name!r}",
                remedy="Pass the tensors alone; send other objects with torch.distributed.broadcast_object_list.",
                rank=MPI.COMM_WORLD.rank,
            )
        tensors.append(tensor.detach())
    return tensors


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


class _KeptSync:
    """The sync of a module with codec "delta": kept between calls, because differences need the last version."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._sync: ParameterSync | None = None
        self._memory: list[object] = []

    def run(self, tensors: list[torch.Tensor], root: int, communicator: Communicator, *, exact_root: bool) -> None:
        """Broadcast. If tensors have moved on this rank, its sync starts anew and all ranks get the whole values."""
        memory = [(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors]
        if self._sync is None or memory != self._memory:
            self.close()
            self._sync = ParameterSync(tensors, root, "delta", communicator, exact_root=exact_root, name=self._name)
            self._memory = [*memory]
        self._sync()

    def close(self) -> None:
        """Free the last version."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None


_kept: WeakKeyDictionary[torch.nn.Module, dict[object, _KeptSync]] = WeakKeyDictionary()
"""By module, then by communicator, root, buffers and exact_root."""
_retired: list[_KeptSync] = []
"""Those of modules that are gone; a finalizer may run in any thread, so the next call frees them."""


def _kept_sync(module: torch.nn.Module, communicator: Communicator, key: object) -> _KeptSync:
    while _retired:
        _retired.pop().close()
    kept = _kept.setdefault(module, {})
    if key not in kept:
        kept[key] = _KeptSync(f"kept parameters {number_on(communicator, 'kept parameters')}")
        finalize(module, _retired.append, kept[key]).atexit = False
    return kept[key]


def sync_parameters(
    module: torch.nn.Module | Mapping[str, torch.Tensor],
    root: int = 0,
    codec: str | Codec | None = None,
    ranks: Ranks = None,
    *,
    buffers: bool = True,
    exact_root: bool = False,
) -> None:
    """Broadcast the parameters and buffers of a module, or the tensors of a state_dict; see `ParameterSync`.

    With codec="delta" each rank keeps a copy of what was sent for as long as the module exists, and the next call with
    the same arguments sends the differences from it.
    """
    tensors = tensors_of(module, "sync_parameters", buffers=buffers)
    if codec != "delta":
        sync = ParameterSync(tensors, root, codec, ranks, exact_root=exact_root)
        sync()
        sync.close()
        return
    communicator = None if isinstance(ranks, MPI.Intracomm) else communicator_of(ranks)
    if communicator is None or not isinstance(module, torch.nn.Module):
        raise SpecError(
            "sync_parameters with codec delta",
            expected="a module, and a Communicator or a torch group, to which the last version belongs",
            got="an MPI communicator" if communicator is None else f"an object of type {type(module).__qualname__}",
            remedy="Keep a Communicator, or a ParameterSync of the tensors.",
            rank=MPI.COMM_WORLD.rank,
        )
    kept = _kept_sync(module, communicator, (communicator, root, buffers, exact_root))
    kept.run(tensors, root, communicator, exact_root=exact_root)


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
