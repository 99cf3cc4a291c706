"""The command `training`: small models on all ranks, by several contenders in turns; a table, a file and a plot."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.cli.output import table
from osu_bench.flags import names

if TYPE_CHECKING:
    import argparse

    from osu_bench.training.results import Session, Summary

__all__ = ["add"]

CONTENDERS = ["none", "split", "zfp:rate=16", "bound:abs=1e-4"]
HEADER = ("contender", "s/step", "saved", "parameters", "gradients", "validation loss")
MODELS, SIZES = ("transformer", "resnet"), ("small", "large")


def add(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    about = "train a small model on all ranks, with parameters and gradients compressed in several ways"
    parser = commands.add_parser("training", help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.add_argument("--model", choices=MODELS, default="transformer", help="(default transformer)")
    parser.add_argument("--size", choices=SIZES, default="small", help="(default small)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="of each training (default 100)")
    parser.add_argument(
        "--seeds", type=_numbers, default=[1], metavar="A,B", help="a training of each contender for each (default 1)"
    )
    parser.add_argument(
        "--compare",
        type=names,
        default=CONTENDERS,
        metavar="A,B",
        help="codecs of parameters, with /CODEC behind for gradients; p2p:CODEC, delta, gloo "
        f"(default {','.join(CONTENDERS)})",
    )
    parser.add_argument("--json", metavar="FILE", help="add the results to this file")
    parser.add_argument("--plot", metavar="FILE", help="draw loss against time; .png, .svg or .pdf")
    parser.add_argument("--show", metavar="FILE", help="train nothing, and show what is in a file")
    parser.set_defaults(run=_run)


def _numbers(text: str) -> list[int]:
    """Read a list of seeds."""
    return [int(name) for name in names(text)]


def _run(args: argparse.Namespace) -> int:
    from osu_bench.training.results import joined, load

    if args.show is None:
        return _measure(args)
    for session in (sessions := joined(load(args.show))):
        _print(session)
    _draw(sessions, args.plot)
    return 0


def _measure(args: argparse.Namespace) -> int:
    """Train on all ranks; an error of one ends them all."""
    from mpi4py import MPI

    from mpi_gpucomp.errors import GpucompError

    try:
        session = _trained(args)
    except Exception as error:
        if MPI.COMM_WORLD.size == 1:
            raise
        sys.excepthook(*sys.exc_info())
        MPI.COMM_WORLD.Abort(2 if isinstance(error, GpucompError) else 1)
        return 2
    if MPI.COMM_WORLD.rank == 0:
        _print(session)
        _keep(session, args)
    return 0


def _trained(args: argparse.Namespace) -> Session:
    # Else hosts whose addresses have no names make torch warn, once for each connection.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    import mpi_gpucomp.torch  # noqa: F401  makes torch know the backend
    from osu_bench.bench import NETWORK
    from osu_bench.results import machine
    from osu_bench.training.loop import train
    from osu_bench.training.results import Session
    from osu_bench.training.task import SIZES, TASKS

    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gpucomp")
    size, comm = SIZES[args.model, args.size], MPI.COMM_WORLD
    network = json.loads(os.environ.get(NETWORK, "{}"))
    task, start = TASKS[args.model](size), perf_counter()

    def tell(seed: int, step: int, loss: float) -> None:
        if comm.rank == 0 and (step + 1) % max(1, args.steps // 5) == 0:
            print(f"# seed {seed}, step {step + 1}: loss {loss:.3f}, {perf_counter() - start:.0f} s", flush=True)

    trained = []
    for seed in args.seeds:
        trained += train(task, args.compare, args.steps, seed, partial(tell, seed))
    comm.Barrier()
    dist.destroy_process_group()
    return Session(args.model, args.size, comm.size, network.get("rate"), size.batch, trained, machine())


def _keep(session: Session, args: argparse.Namespace) -> None:
    from osu_bench.training.results import load, save

    if args.json:
        save([*(load(args.json) if Path(args.json).exists() else []), session], args.json)
    _draw([session], args.plot)


def _draw(sessions: list[Session], path: str | None) -> None:
    if path:
        from osu_bench.training.plot import plot

        plot(sessions, path)


def _print(session: Session) -> None:
    from osu_bench.cluster.rate import in_words
    from osu_bench.training.results import summaries

    parameters, steps = session.trained[0].parameters, len(session.trained[0].seconds)
    network = f", {in_words(session.rate)}" if session.rate else ""
    print(
        f"\n# {session.model}, {parameters / 1e6:.1f} million parameters, {session.ranks} ranks{network}, {steps} steps"
    )
    print(table(HEADER, [_row(summary) for summary in summaries(session)]), flush=True)


def _row(summary: Summary) -> tuple[str, ...]:
    loss = f"{summary.validation:.4f}"
    return (
        summary.contender,
        f"{summary.seconds:.3f}",
        "" if summary.saved is None else f"{100 * summary.saved:.1f} %",
        _megabytes(summary.parameter_bytes),
        _megabytes(summary.gradient_bytes),
        loss if summary.spread is None else f"{loss} +- {summary.spread:.4f} ({summary.seeds} seeds)",
    )


def _megabytes(count: float | None) -> str:
    return "" if count is None else f"{count / 1e6:.1f} MB"
