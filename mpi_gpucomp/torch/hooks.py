"""A hook for DistributedDataParallel that averages gradients through a Communicator, with any codec.

    state = HookState(codec="bound:rel=1e-3", warmup_steps=10)
    model.register_comm_hook(state, gpucomp_hook)

Each bucket is a collective with a name, which goes on in the background while backward computes the next ones.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI
from torch._C._distributed_c10d import GradBucket

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.torch.collectives import communicator_of
from mpi_gpucomp.torch.feedback import ErrorFeedback

if TYPE_CHECKING:
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.torch.collectives import Ranks

__all__ = ["HookState", "gpucomp_hook"]

_numbers = count()


class HookState:
    """What the hook of one model needs from step to step."""

    def __init__(
        self,
        ranks: Ranks = None,
        codec: str | Codec | None = None,
        *,
        error_feedback: bool = True,
        warmup_steps: int = 0,
        name: str | None = None,
    ) -> None:
        """Average among the ranks of a Communicator, an MPI communicator or a torch group; None: of all.

        Without a `codec` it is the one that the communicator has for the role "gradients", or for everything. With a
        lossy one, `error_feedback` adds what it took from a gradient to the next. The first `warmup_steps` are not
        compressed. The ranks' states of one model have one `name`: by default, that of their number on each rank.
        """
        self.communicator = communicator_of(ranks)
        own = self.communicator.codec_for("gradients") or self.communicator.codec_for() or "auto"
        self.codec = get_codec(own if codec is None else codec)
        if warmup_steps < 0:
            raise SpecError(
                "HookState",
                expected="a number of warm-up steps, 0 or more",
                got=str(warmup_steps),
                remedy="Pass 0 to compress from the first step on.",
                rank=self.communicator.rank,
            )
        self.warmup_steps, self.step = warmup_steps, 0
        self.name = f"gradients {next(_numbers)}" if name is None else name
        self._feedback = ErrorFeedback() if error_feedback else None

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket's gradients; the future has them."""
        gradient = bucket.buffer()
        codec = self._codec(gradient)
        gradient.div_(self.communicator.size)
        if self._feedback is not None and not codec.lossless:
            self._feedback.apply(codec, bucket.parameters(), gradient)
        self.step += bucket.is_last()
        return self._summed(gradient, codec, f"{self.name}, bucket {bucket.index()}")

    def _codec(self, gradient: torch.Tensor) -> Codec:
        kind = str(gradient.dtype).removeprefix("torch.")
        return self.codec if self.step >= self.warmup_steps and kind in self.codec.dtypes else get_codec("none")

    def _summed(self, gradient: torch.Tensor, codec: Codec, name: str) -> torch.futures.Future[torch.Tensor]:
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
            request.Wait()  # no thread goes on with it, and DDP would wait for ever
        return future


def gpucomp_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients: for `ddp.register_comm_hook(state, gpucomp_hook)`."""
    return state.average(bucket)


# DDP compares the annotations with the types themselves.
gpucomp_hook.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]})
