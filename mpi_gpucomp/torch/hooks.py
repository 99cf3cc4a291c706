"""A DistributedDataParallel communication hook that averages gradients with any codec, with error feedback.

    state = HookState(codec="bound:rel=1e-3", warmup_steps=10)
    model.register_comm_hook(state, gpucomp_hook)

Each bucket is a named non-blocking all-reduce, which overlaps with the rest of the backward pass.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.device import as_buffer, get_device, order_after
from mpi_gpucomp.device.host import HostDevice
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.torch.backend import communicator_of, number_on

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.communicator import Communicator
    from mpi_gpucomp.device import Stream
    from mpi_gpucomp.torch.backend import Ranks

__all__ = ["HookState", "gpucomp_hook"]

FEEDBACK_BLOCK_BYTES = 1 << 21
"""Bytes encoded at a time for error feedback: fits the cache, and relative bounds see ranges as of a chunk."""


class HookState:
    """State of the hook of one model."""

    def __init__(
        self,
        ranks: Ranks = None,
        codec: str | Codec | None = None,
        *,
        error_feedback: bool = True,
        warmup_steps: int = 0,
        name: str | None = None,
    ) -> None:
        """Average over the ranks of a Communicator, an MPI communicator or a torch group; None means the model's group.

        `codec` defaults to the communicator's codec for the role "gradients", then to its default codec. With a lossy
        codec, `error_feedback` adds the error of each gradient to the next. The first `warmup_steps` steps are not
        compressed. `name` must be the same on all ranks; by default, states are numbered in order of registration.
        """
        self._communicator: Communicator | None = None
        self._joins = ranks is None
        self._codec = None if codec is None else get_codec(codec)
        self._name = name
        if ranks is not None:
            self._take(communicator_of(ranks))
        if warmup_steps < 0:
            raise SpecError(
                "HookState",
                expected="warmup_steps of 0 or more",
                got=str(warmup_steps),
                remedy="Pass 0 to compress from the first step on.",
                rank=MPI.COMM_WORLD.rank,
            )
        self.warmup_steps, self.step = warmup_steps, 0
        self._feedback = _ErrorFeedback() if error_feedback else None

    def _take(self, communicator: Communicator) -> Communicator:
        """Average over these ranks from now on; their order of calls numbers the states."""
        default = communicator.codec_for("gradients") or communicator.codec_for() or "auto"
        self._communicator, self._codec = communicator, self._codec or get_codec(default)
        self._name = self._name or f"gradients {number_on(communicator, 'gradients')}"
        return communicator

    @property
    def communicator(self) -> Communicator:
        """The ranks that gradients are averaged over: all, before a model has joined."""
        return self._communicator or self._take(communicator_of(None))

    @property
    def codec(self) -> Codec:
        """The codec of the gradients."""
        assert self.communicator and self._codec
        return self._codec

    def join(self, model: DistributedDataParallel) -> None:
        """Take the ranks of a model's group, unless others were named."""
        if not self._joins:
            return
        communicator = communicator_of(model.process_group)
        if self._communicator not in (None, communicator):
            raise SpecError(
                "register_comm_hook",
                expected="models of one process group to share a HookState",
                got="models of two groups",
                remedy="Make a HookState for each group.",
                rank=communicator.rank,
            )
        if self._communicator is None:
            self._take(communicator)

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to average the gradients of a bucket; return a future of the result."""
        gradient = bucket.buffer()
        codec = self._codec_of(gradient)
        gradient.div_(self.communicator.size)
        if self._feedback is not None and not codec.lossless:
            self._feedback.apply(codec, bucket.parameters(), gradient)
        self.step += bucket.is_last()
        return self._all_reduce(gradient, codec, f"{self._name}, bucket {bucket.index()}")

    def _codec_of(self, gradient: torch.Tensor) -> Codec:
        dtype = str(gradient.dtype).removeprefix("torch.")
        return self.codec if self.step >= self.warmup_steps and dtype in self.codec.dtypes else get_codec("none")

    def _all_reduce(self, gradient: torch.Tensor, codec: Codec, name: str) -> torch.futures.Future[torch.Tensor]:
        devices: list[int | str | torch.device] = [gradient.device] if gradient.is_cuda else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        request = self.communicator.Iallreduce(
            MPI.IN_PLACE,
            gradient,
            codec=codec,
            name=name,
            callback=lambda: future.set_result(gradient),
            on_error=lambda error: future.set_exception(error),  # type: ignore[arg-type]
        )
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            request.Wait()  # there is no progress thread, and DDP waits only for the future
        return future


def gpucomp_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket: `ddp.register_comm_hook(state, gpucomp_hook)`."""
    return state.average(bucket)


# DDP compares the annotations with the types, not with their names.
gpucomp_hook.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]})


_register_comm_hook = DistributedDataParallel.register_comm_hook


@wraps(_register_comm_hook)
def _join_and_register(model: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
    if isinstance(state, HookState):
        state.join(model)
    _register_comm_hook(model, state, hook)


# A hook learns nothing of the model's group: by default it would average over the ranks of other models too.
DistributedDataParallel.register_comm_hook = _join_and_register  # type: ignore[assignment, method-assign]


class _ErrorFeedback:
    """Error feedback: adds the error that a lossy codec made in a gradient to the next gradient.

    Residuals belong to parameters, not to buckets: DDP rebuilds its buckets after the first step.
    """

    def __init__(self) -> None:
        self._residuals: dict[tuple[int, ...], torch.Tensor] = {}
        """Residual of each bucket, by the identities of its parameters."""
        self._by_parameter: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Parameter and its part of a residual, by identity; the reference keeps the identity valid."""

    def apply(self, codec: Codec, parameters: Sequence[torch.Tensor], gradient: torch.Tensor) -> None:
        """Add the residual to a gradient, replace it by its decoded value, and keep the difference."""
        residual = self._residual_of(parameters, gradient)
        residual.add_(gradient)
        block = FEEDBACK_BLOCK_BYTES // gradient.element_size()
        for start in range(0, gradient.numel(), block):
            _round_trip(codec, residual[start : start + block], gradient[start : start + block])
        torch.sub(residual, gradient, out=residual)
        residual.nan_to_num_(0.0, 0.0, 0.0)  # an overflowed gradient leaves no residual: it would stay infinite

    def _residual_of(self, parameters: Sequence[torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
        key = tuple(map(id, parameters))
        if key not in self._residuals:
            self._residuals[key] = self._new_residual(parameters, gradient)
        return self._residuals[key]

    def _new_residual(self, parameters: Sequence[torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
        """Create the residual of a new bucket from those of its parameters in other buckets."""
        residual, start = torch.zeros_like(gradient), 0
        for parameter in parameters:
            part = residual[start : start + parameter.numel()]
            previous = self._by_parameter.get(id(parameter))
            if previous is not None and previous[1].numel() == part.numel():
                part.copy_(previous[1])
            self._by_parameter[id(parameter)] = parameter, part
            start += parameter.numel()
        used = {part.untyped_storage().data_ptr() for _, part in self._by_parameter.values()}
        self._residuals = {key: old for key, old in self._residuals.items() if old.untyped_storage().data_ptr() in used}
        return residual


def _round_trip(codec: Codec, source: torch.Tensor, target: torch.Tensor) -> None:
    """Encode and decode; copy the values if the codec cannot represent them and they would travel raw."""
    values, result = as_buffer(source), as_buffer(target, writable=True)
    stream = _stream(values.device)
    order_after(values, stream)
    order_after(result, stream)
    with stream.device.alloc(codec.max_encoded(values.count, values.dtype)) as encoded:
        nbytes = codec.encode(values, encoded, stream).result()
        if nbytes is None:
            target.copy_(source)
        else:
            codec.decode(encoded, nbytes, result, stream).result()


@cache
def _stream(name: str) -> Stream:
    device = get_device(name)
    return device.stream(inline=True) if isinstance(device, HostDevice) else device.stream()
