"""The command `training`: train small models with several codecs; print a table, write JSON, draw a plot."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from mpi_gpucomp.cli.command import table
from osu_bench.arguments import CommandParser, names

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from osu_bench.experiments.training.results import Session, Summary

__all__ = ["main"]

CANDIDATES = ["none", "split", "zfp:rate=16", "bound:abs=1e-4"]
HEADER = ("candidate", "s/step", "saved", "parameters", "gradients", "validation loss")
MODELS, SIZES = ("transformer", "resnet"), ("small", "large")


ABOUT = "Train a small model on all ranks and compare codecs for parameters and gradients."
EXAMPLE = """\
mpirun -n 4 osu_bench training --steps 50 --compare none,split,bound:abs=1e-4
osu_bench training --show trained.json"""


def main(argv: Sequence[str] | None = None) -> int:
    """Train with several candidates, or print the results in a file."""
    parser = CommandParser("osu_bench training", ABOUT, EXAMPLE)
    parser.add_argument("--model", choices=MODELS, default="transformer", help="(default transformer)")
    parser.add_argument("--size", choices=SIZES, default="small", help="(default small)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="optimizer steps per run (default 100)")
    parser.add_argument(
        "--seeds", type=_numbers, default=[1], metavar="A,B", help="random seeds; one run per seed (default 1)"
    )
    parser.add_argument(
        "--compare",
        type=names,
        default=CANDIDATES,
        metavar="A,B",
        help=f"candidates: PARAMETER_CODEC[/GRADIENT_CODEC], p2p:CODEC, delta or gloo (default {','.join(CANDIDATES)})",
    )
    parser.add_argument("--json", metavar="FILE", help="append the results to FILE")
    parser.add_argument("--plot", metavar="FILE", help="plot loss against time (.png, .svg or .pdf)")
    parser.add_argument("--show", metavar="FILE", help="print the results in FILE instead of training")
    return _run(parser.parse_args(argv))


def _numbers(text: str) -> list[int]:
    """Parse a comma-separated list of integers."""
    return [int(name) for name in names(text)]


def _run(args: argparse.Namespace) -> int:
    from osu_bench.experiments.training.results import load, merge_seeds

    if args.show is None:
        return _measure(args)
    for session in (sessions := merge_seeds(load(args.show))):
        _print(session)
    _plot(sessions, args.plot)
    return 0


def _measure(args: argparse.Namespace) -> int:
    """Train on all ranks; abort the job if one of them fails."""
    from mpi4py import MPI

    from mpi_gpucomp.errors import GpucompError

    try:
        session = _train(args)
    except Exception as error:
        if MPI.COMM_WORLD.size == 1:
            raise
        sys.excepthook(*sys.exc_info())
        MPI.COMM_WORLD.Abort(2 if isinstance(error, GpucompError) else 1)
        return 2
    if MPI.COMM_WORLD.rank == 0:
        _print(session)
        _save(session, args)
    return 0


def _train(args: argparse.Namespace) -> Session:
    # torch logs a warning per connection if a host address has no name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    import mpi_gpucomp.torch  # noqa: F401  registers the backend
    from osu_bench.experiments.training.loop import train
    from osu_bench.experiments.training.results import Session
    from osu_bench.experiments.training.task import SIZES, TASKS
    from osu_bench.suite.results import machine
    from osu_bench.suite.runner import NETWORK

    torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group("gpucomp")
    size, comm = SIZES[args.model, args.size], MPI.COMM_WORLD
    network = json.loads(os.environ.get(NETWORK, "{}"))
    task, start = TASKS[args.model](size), perf_counter()

    def report(seed: int, step: int, loss: float) -> None:
        if comm.rank == 0 and (step + 1) % max(1, args.steps // 5) == 0:
            print(f"# seed {seed}, step {step + 1}: loss {loss:.3f}, {perf_counter() - start:.0f} s", flush=True)

    runs = []
    for seed in args.seeds:
        runs += train(task, args.compare, args.steps, seed, partial(report, seed))
    comm.Barrier()
    dist.destroy_process_group()
    return Session(args.model, args.size, comm.size, network.get("rate"), size.batch, runs, machine())


def _save(session: Session, args: argparse.Namespace) -> None:
    from osu_bench.experiments.training.results import load, save

    if args.json:
        save([*(load(args.json) if Path(args.json).exists() else []), session], args.json)
    _plot([session], args.plot)


def _plot(sessions: list[Session], path: str | None) -> None:
    if path:
        from osu_bench.experiments.training.plot import plot

        plot(sessions, path)


def _print(session: Session) -> None:
    from osu_bench.cluster.network import rate_label
    from osu_bench.experiments.training.results import summaries

    parameters, steps = session.trained[0].parameters, len(session.trained[0].seconds)
    network = f", {rate_label(session.rate)}" if session.rate else ""
    print(
        f"\n# {session.model}, {parameters / 1e6:.1f} million parameters, {session.ranks} ranks{network}, {steps} steps"
    )
    print(table(HEADER, [_row(summary) for summary in summaries(session)]), flush=True)


def _row(summary: Summary) -> tuple[str, ...]:
    loss = f"{summary.validation:.4f}"
    return (
        summary.candidate,
        f"{summary.seconds:.3f}",
        "" if summary.saved is None else f"{100 * summary.saved:.1f} %",
        _megabytes(summary.parameter_bytes),
        _megabytes(summary.gradient_bytes),
        loss if summary.spread is None else f"{loss} +- {summary.spread:.4f} ({summary.seeds} seeds)",
    )


def _megabytes(count: float | None) -> str:
    return "" if count is None else f"{count / 1e6:.1f} MB"
