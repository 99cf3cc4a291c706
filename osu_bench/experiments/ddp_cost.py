"""Time of a DDP step with this backend, against gloo: 10 million parameters, alternating in one run.

    mpirun -n 2 osu_bench ddp_cost --codec none

Times are those of the slowest rank. The ratio is the median over neighbouring rounds, printed with its quartiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpi_gpucomp.torch import Options
from osu_bench.arguments import CommandParser

WIDTHS = (1024, 2048, 2048, 1792)
"""Widths of the layers: 10 million parameters."""
BATCH = 16
WARM_UP = 4


class Trainer:
    """A model trained over one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Initialise the model, equally for every group."""
        torch.manual_seed(0)
        layers = [layer for a, b in pairwise(WIDTHS) for layer in (nn.Linear(a, b), nn.ReLU())]
        self._model = DistributedDataParallel(nn.Sequential(*layers), process_group=group)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._inputs = torch.randn(BATCH, WIDTHS[0])

    def step(self) -> float:
        """Run one step; return this rank's seconds."""
        start = perf_counter()
        self._optimizer.zero_grad()
        self._model(self._inputs).sum().backward()
        self._optimizer.step()
        return perf_counter() - start


def rounds_of(gloo: dist.ProcessGroup, pair: tuple[Trainer, Trainer], rounds: int) -> list[tuple[float, float]]:
    """Return the slowest rank's seconds in each round; the order alternates."""
    found = []
    for number in range(-WARM_UP, rounds):
        times = torch.zeros(2)
        for which in (number % 2, 1 - number % 2):
            dist.barrier(gloo)
            times[which] = pair[which].step()
        dist.all_reduce(times, dist.ReduceOp.MAX, gloo)
        if number >= 0:
            found.append((float(times[0]), float(times[1])))
    return found


EXAMPLE = "mpirun -n 2 osu_bench ddp_cost --codec none"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the times and their ratio."""
    parser = CommandParser("osu_bench ddp_cost", (__doc__ or "").splitlines()[0], EXAMPLE)
    parser.add_argument("-i", "--rounds", type=int, default=40, help="measured rounds (40)")
    parser.add_argument("--codec", default="none", metavar="SPEC", help="codec of the calls (none)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gpucomp", pg_options=Options(codec=options.codec))
    gloo, ours = dist.new_group(backend="gloo"), dist.group.WORLD
    assert ours is not None
    found = rounds_of(gloo, (Trainer(gloo), Trainer(ours)), options.rounds)
    if dist.get_rank() == 0:
        theirs, own = (median(times) * 1e3 for times in zip(*found, strict=True))
        low, middle, high = quantiles([time / other for other, time in found])
        print(f"# {dist.get_world_size()} ranks, DDP, 10 million parameters, codec {options.codec}")
        print(f"gloo {theirs:.1f} ms, gpucomp {own:.1f} ms, ratio {middle:.3f} (quartiles {low:.3f}, {high:.3f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
