"""Exchange of updated parameters after each step, from the rank that owns them to all others.

All exchanges use torch's ZeroRedundancyOptimizer with one bucket of parameters per rank. By default the buckets are
broadcast by a `gpucomp` process group; `p2p:CODEC` encodes each point-to-point message, `delta` broadcasts differences,
and `gloo` uses torch's gloo backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.optim import ZeroRedundancyOptimizer

from mpi_gpucomp import Communicator
from mpi_gpucomp.torch import Options, ParameterSync
from osu_bench.suite.baselines import PerMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["ParameterExchange", "parameter_exchange"]


class ParameterExchange:
    """Parameter exchange by the broadcasts of a torch process group."""

    def __init__(self, group: Any) -> None:
        """Use a process group; collective."""
        self.group = group

    def optimizer(self, parameters: Iterable[torch.Tensor], learning_rate: float) -> ZeroRedundancyOptimizer:
        """Create the optimizer of a model."""
        return ZeroRedundancyOptimizer(
            parameters, torch.optim.AdamW, self.group, parameters_as_bucket_view=True, lr=learning_rate
        )

    def bytes_sent(self) -> int | None:
        """Return the bytes sent by this rank so far, or None if not counted."""
        communicator = getattr(self.group, "communicator", None)
        return communicator.stats().bytes_sent if isinstance(communicator, Communicator) else None

    def close(self) -> None:
        """Destroy the group; collective."""
        dist.destroy_process_group(self.group)


class _BucketExchange(ParameterExchange):
    """Base of exchanges that replace the optimizer's broadcasts; the default group serves its other collectives."""

    def __init__(self) -> None:
        super().__init__(dist.group.WORLD)

    def optimizer(self, parameters: Iterable[torch.Tensor], learning_rate: float) -> ZeroRedundancyOptimizer:
        """Create an optimizer that calls `exchange` instead of broadcasting."""
        exchange = self.exchange

        class Optimizer(ZeroRedundancyOptimizer):
            def _sync_params(self) -> None:
                exchange(self._buckets[0])

        return Optimizer(parameters, torch.optim.AdamW, self.group, parameters_as_bucket_view=True, lr=learning_rate)

    def exchange(self, buckets: list[torch.Tensor]) -> None:
        """Broadcast each rank's bucket."""
        raise NotImplementedError


class _PerMessageExchange(_BucketExchange):
    def __init__(self, codec: str) -> None:
        super().__init__()
        self._broadcasts = PerMessage(MPI.COMM_WORLD, codec)

    def exchange(self, buckets: list[torch.Tensor]) -> None:
        """Broadcast one bucket after the other."""
        for root, bucket in enumerate(buckets):
            self._broadcasts.bcast(bucket.numpy(), root)

    def bytes_sent(self) -> int:
        """Return the bytes sent by this rank so far."""
        return self._broadcasts.stats()[0]

    def close(self) -> None:
        """Free the communicator; collective."""
        self._broadcasts.close()


class _DeltaExchange(_BucketExchange):
    def __init__(self) -> None:
        super().__init__()
        self._communicator = Communicator(MPI.COMM_WORLD)
        self._syncs: list[ParameterSync] = []

    def exchange(self, buckets: list[torch.Tensor]) -> None:
        """Start all broadcasts, then wait for them."""
        if not self._syncs:
            self._syncs = [ParameterSync([b], n, "delta", self._communicator) for n, b in enumerate(buckets)]
        for sync in self._syncs:
            sync.start()
        for sync in self._syncs:
            sync.wait()

    def bytes_sent(self) -> int:
        """Return the bytes sent by this rank so far."""
        return self._communicator.stats().bytes_sent

    def close(self) -> None:
        """Free the communicator; collective."""
        for sync in self._syncs:
            sync.close()
        self._communicator.Free()


def parameter_exchange(name: str) -> ParameterExchange:
    """Create the exchange of a candidate; collective."""
    kind, _, codec = name.partition(":")
    special: dict[str, Callable[[], ParameterExchange]] = {
        "p2p": lambda: _PerMessageExchange(codec),
        "delta": _DeltaExchange,
        "gloo": lambda: ParameterExchange(dist.new_group(backend="gloo")),
    }
    if kind in special:
        return special[kind]()
    # The owner keeps its exact values: if they were rounded after each step, small updates could be lost. The codec is
    # set by role because a group whose only codec is `none` passes everything through to native MPI, and the candidate
    # `none` measures the chunked chain.
    options = Options(roles={"parameters": name}, exact_root=True)
    return ParameterExchange(dist.new_group(backend="gpucomp", pg_options=options))
