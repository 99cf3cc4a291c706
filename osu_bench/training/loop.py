"""Training: contenders take turns, step by step, each with a model of its own, on the same data."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

from mpi_gpucomp import Communicator
from mpi_gpucomp.torch import HookState, gpucomp_hook
from osu_bench.training.results import Trained
from osu_bench.training.spreading import spreading

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from osu_bench.training.task import Task

__all__ = ["train"]

WORLD = MPI.COMM_WORLD


class _Learner:
    """One contender: how parameters travel, and behind a slash how gradients do; those are `none` otherwise."""

    def __init__(self, task: Task, name: str, seed: int, communicators: dict[str, Communicator]) -> None:
        """Share communicators by codec with other contenders: each has a thread that looks for work now and then."""
        self.name, self._task = name, task
        parameters, _, gradients = name.partition("/")
        gradients = gradients or "none"
        torch.manual_seed(seed)
        model = task.model()
        self.count = sum(parameter.numel() for parameter in model.parameters())
        self._spreading = spreading(parameters)
        self._optimizer = self._spreading.optimizer(model.parameters(), task.size.rate)
        self._gradients: Communicator | None = None
        if parameters == "gloo":
            self._model = DistributedDataParallel(model, process_group=self._spreading.group)
        else:
            if gradients not in communicators:
                communicators[gradients] = Communicator(WORLD, gradients)
            self._gradients = communicators[gradients]
            self._model = DistributedDataParallel(model)
            self._model.register_comm_hook(HookState(self._gradients), gpucomp_hook)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Learn from some examples; return the loss before."""
        self._optimizer.zero_grad()
        loss = self._task.loss(self._model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return float(loss.detach())

    def sent(self) -> tuple[int, int] | None:
        """Return the bytes of parameters and of gradients that this rank has sent, if they are known."""
        parameters = self._spreading.sent()
        if self._gradients is None or parameters is None:
            return None
        return parameters, self._gradients.stats().bytes_sent

    def validate(self) -> float:
        """Return the loss with examples that were held back."""
        return self._task.validate(self._model.module)

    def close(self) -> None:
        """Free what it used alone; all ranks do."""
        self._spreading.close()


def train(
    task: Task, contenders: Sequence[str], steps: int, seed: int, tell: Callable[[int, float], None]
) -> list[Trained]:
    """Train all contenders for so many steps; `tell` hears of each."""
    communicators: dict[str, Communicator] = {}
    learners = [_Learner(task, name, seed, communicators) for name in contenders]
    trained = [Trained(learner.name, seed, learner.count) for learner in learners]
    random = torch.Generator().manual_seed(1000 * seed + WORLD.rank)
    for step in range(steps):
        x, y = task.batch(task.size.batch, random)
        for learner, result in zip(learners, trained, strict=True):
            _turn(learner, result, x, y)
        tell(step, trained[0].losses[-1])
    for learner, result in zip(learners, trained, strict=True):
        if WORLD.rank == 0:  # which tells; on others it would only take time
            result.validation = learner.validate()
        WORLD.Barrier()
        learner.close()
    for communicator in communicators.values():
        communicator.Free()
    return trained


def _turn(learner: _Learner, result: Trained, x: torch.Tensor, y: torch.Tensor) -> None:
    """Let one take a step; the time is that of the slowest rank, the loss that of all, the traffic the busiest's."""
    before = learner.sent()
    WORLD.Barrier()
    start = perf_counter()
    loss = learner.step(x, y)
    seconds = perf_counter() - start
    after = learner.sent()
    result.seconds.append(round(WORLD.allreduce(seconds, MPI.MAX), 6))
    result.losses.append(WORLD.allreduce(loss) / WORLD.size)
    if before is not None and after is not None:
        sent = [WORLD.allreduce(later - earlier, MPI.MAX) for earlier, later in zip(before, after, strict=True)]
        result.parameter_bytes.append(sent[0])
        result.gradient_bytes.append(sent[1])
