"""How updated parameters get from the rank that owns them to all others, after each step.

All are torch's ZeroRedundancyOptimizer, with one bucket of parameters for each rank. Ours broadcasts them through the
process group `gpucomp`; `p2p:CODEC` encodes each message, `delta` sends what has changed, `gloo` is torch's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.optim import ZeroRedundancyOptimizer

from mpi_gpucomp import Communicator
from mpi_gpucomp.torch import Options, ParameterSync
from osu_bench.rivals.p2p import PerMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Spreading", "spreading"]


class Spreading:
    """One way, over a group of torch's."""

    def __init__(self, group: Any) -> None:
        """Let all ranks make one."""
        self.group = group

    def optimizer(self, parameters: Iterable[torch.Tensor], rate: float) -> ZeroRedundancyOptimizer:
        """Make the optimizer of a model."""
        return ZeroRedundancyOptimizer(
            parameters, torch.optim.AdamW, self.group, parameters_as_bucket_view=True, lr=rate
        )

    def sent(self) -> int | None:
        """Return the bytes that this rank has sent so far, if that is known."""
        communicator = getattr(self.group, "communicator", None)
        return communicator.stats().bytes_sent if isinstance(communicator, Communicator) else None

    def close(self) -> None:
        """End it; all ranks do."""
        dist.destroy_process_group(self.group)


class _Another(Spreading):
    """A way beside torch's groups, which only serve for what the optimizer asks of them otherwise."""

    def __init__(self) -> None:
        super().__init__(dist.group.WORLD)

    def optimizer(self, parameters: Iterable[torch.Tensor], rate: float) -> ZeroRedundancyOptimizer:
        """Make one that calls `spread` in place of its broadcasts."""
        spread = self.spread

        class Optimizer(ZeroRedundancyOptimizer):
            def _sync_params(self) -> None:
                spread(self._buckets[0])

        return Optimizer(parameters, torch.optim.AdamW, self.group, parameters_as_bucket_view=True, lr=rate)

    def spread(self, buckets: list[torch.Tensor]) -> None:
        """Send each rank's bucket to all others."""
        raise NotImplementedError


class _PerMessage(_Another):
    def __init__(self, codec: str) -> None:
        super().__init__()
        self._rival = PerMessage(MPI.COMM_WORLD, codec)

    def spread(self, buckets: list[torch.Tensor]) -> None:
        """Broadcast one after the other, as MPI would."""
        for root, bucket in enumerate(buckets):
            self._rival.bcast(bucket.numpy(), root)

    def sent(self) -> int:
        """Ask the rival."""
        return self._rival.stats()[0]

    def close(self) -> None:
        """Close the rival."""
        self._rival.close()


class _Delta(_Another):
    def __init__(self) -> None:
        super().__init__()
        self._communicator = Communicator(MPI.COMM_WORLD)
        self._syncs: list[ParameterSync] = []

    def spread(self, buckets: list[torch.Tensor]) -> None:
        """Start all, then wait."""
        if not self._syncs:
            self._syncs = [ParameterSync([b], n, "delta", self._communicator) for n, b in enumerate(buckets)]
        for sync in self._syncs:
            sync.start()
        for sync in self._syncs:
            sync.wait()

    def sent(self) -> int:
        """Ask the communicator."""
        return self._communicator.stats().bytes_sent

    def close(self) -> None:
        """Free the communicator."""
        for sync in self._syncs:
            sync.close()
        self._communicator.Free()


def spreading(name: str) -> Spreading:
    """Make the way of a name; all ranks do."""
    kind, _, codec = name.partition(":")
    others: dict[str, Callable[[], Spreading]] = {
        "p2p": lambda: _PerMessage(codec),
        "delta": _Delta,
        "gloo": lambda: Spreading(dist.new_group(backend="gloo")),
    }
    if kind in others:
        return others[kind]()
    # The owner keeps what it has computed: rounded again after each step, small updates may be lost. The codec is that
    # of a role, because a group with none but `none` is MPI's own, and here it is the chunked chain.
    return Spreading(dist.new_group(backend="gpucomp", pg_options=Options(roles={"parameters": name}, exact_root=True)))
