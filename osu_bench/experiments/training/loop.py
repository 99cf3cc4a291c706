"""The training loop: candidates alternate step by step, each with its own model, on the same data."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

from mpi_gpucomp import Communicator
from mpi_gpucomp.cli.command import allgather_json
from mpi_gpucomp.torch import HookState, gpucomp_hook
from osu_bench.experiments.training.results import TrainingRun
from osu_bench.experiments.training.spreading import parameter_exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from osu_bench.experiments.training.task import Task

__all__ = ["train"]

WORLD = MPI.COMM_WORLD


class _Trainer:
    """One candidate, named `PARAMETER_CODEC[/GRADIENT_CODEC]`; gradients are not encoded by default."""

    def __init__(self, task: Task, name: str, seed: int, communicators: dict[str, Communicator]) -> None:
        """Share one communicator per gradient codec: each has a progress thread that polls."""
        self.name, self._task = name, task
        parameters, _, gradients = name.partition("/")
        gradients = gradients or "none"
        torch.manual_seed(seed)
        model = task.model()
        self.count = sum(parameter.numel() for parameter in model.parameters())
        self._exchange = parameter_exchange(parameters)
        self._optimizer = self._exchange.optimizer(model.parameters(), task.size.learning_rate)
        self._gradients: Communicator | None = None
        if parameters == "gloo":
            self._model = DistributedDataParallel(model, process_group=self._exchange.group)
        else:
            if gradients not in communicators:
                communicators[gradients] = Communicator(WORLD, gradients)
            self._gradients = communicators[gradients]
            self._model = DistributedDataParallel(model)
            self._model.register_comm_hook(HookState(self._gradients), gpucomp_hook)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Take an optimizer step; return the loss."""
        self._optimizer.zero_grad()
        loss = self._task.loss(self._model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return float(loss.detach())

    def bytes_sent(self) -> tuple[int, int] | None:
        """Return the bytes of parameters and of gradients sent by this rank, or None if not counted."""
        parameters = self._exchange.bytes_sent()
        if self._gradients is None or parameters is None:
            return None
        return parameters, self._gradients.stats().bytes_sent

    def validate(self) -> float:
        """Return the validation loss."""
        return self._task.validate(self._model.module)

    def close(self) -> None:
        """Release the parameter exchange; collective."""
        self._exchange.close()


def train(
    task: Task, candidates: Sequence[str], steps: int, seed: int, report: Callable[[int, float], None]
) -> list[TrainingRun]:
    """Train all candidates; call `report` with the number and loss of each step."""
    communicators: dict[str, Communicator] = {}
    trainers = [_Trainer(task, name, seed, communicators) for name in candidates]
    runs = [TrainingRun(trainer.name, seed, trainer.count) for trainer in trainers]
    random = torch.Generator().manual_seed(1000 * seed + WORLD.rank)
    for step in range(steps):
        x, y = task.batch(task.size.batch, random)
        for trainer, run in zip(trainers, runs, strict=True):
            _timed_step(trainer, run, x, y)
        report(step, runs[0].losses[-1])
    for trainer, run in zip(trainers, runs, strict=True):
        if WORLD.rank == 0:  # only rank 0 reports it
            run.validation = trainer.validate()
        WORLD.Barrier()
        trainer.close()
    for communicator in communicators.values():
        communicator.Free()
    return runs


def _timed_step(trainer: _Trainer, run: TrainingRun, x: torch.Tensor, y: torch.Tensor) -> None:
    """Take a step; record the time of the slowest rank, the mean loss and the bytes of the busiest rank."""
    before = trainer.bytes_sent()
    WORLD.Barrier()
    start = perf_counter()
    loss = trainer.step(x, y)
    seconds = perf_counter() - start
    after = trainer.bytes_sent()
    sent = [later - earlier for earlier, later in zip(before or (), after or (), strict=True)]
    times, losses, traffic = zip(*allgather_json(WORLD, (seconds, float(loss), sent)), strict=True)
    run.seconds.append(round(max(times), 6))
    run.losses.append(sum(losses) / WORLD.size)
    if sent:
        parameter_bytes, gradient_bytes = map(max, zip(*traffic, strict=True))
        run.parameter_bytes.append(parameter_bytes)
        run.gradient_bytes.append(gradient_bytes)
