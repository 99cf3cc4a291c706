"""The command line: one word for each benchmark, and for what is done with clusters and results.

Exit codes: 0, all is well. 1: a result was wrong. 2: something cannot be done as asked. 130: interrupted.
MPI is only started by those that measure, so that the others run anywhere.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp import __version__
from mpi_gpucomp.errors import GpucompError
from osu_bench.flags import Flags, add_flags

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BENCHMARKS", "main"]

FIRST_RANK_SPEAKS = 10.0
"""Seconds that other ranks leave to the first one for its usage message; its end ends them before."""


class Benchmark(NamedTuple):
    """Where a benchmark is, and which flags it has."""

    module: str
    function: str
    defaults: str
    help: str
    windows: bool = False
    pairs: bool = False
    nonblocking: bool = False


COLLECTIVES = ("bcast", "reduce", "allreduce", "allgather", "reduce_scatter", "alltoall", "gather", "scatter")
BENCHMARKS = {
    "latency": Benchmark("point_to_point", "latency", "LATENCY", "half a round trip between two ranks"),
    "bw": Benchmark("point_to_point", "bandwidth", "BANDWIDTH", "bandwidth one way", windows=True),
    "bibw": Benchmark("point_to_point", "bandwidth", "BANDWIDTH", "bandwidth both ways", windows=True),
    "mbw_mr": Benchmark(
        "point_to_point", "message_rate", "BANDWIDTH", "bandwidth and rate of many pairs", windows=True, pairs=True
    ),
    **{name: Benchmark("blocking", "collective", "DEFAULTS", f"latency of {name}") for name in COLLECTIVES},
    "barrier": Benchmark("blocking", "barrier", "DEFAULTS", "latency of a barrier"),
    **{
        f"i{name}": Benchmark(
            "nonblocking", "overlap", "DEFAULTS", f"how much of {name} a rank can compute in", nonblocking=True
        )
        for name in COLLECTIVES
    },
}
COMMANDS = (
    "osu_bench.cluster.command",
    "osu_bench.headline",
    "osu_bench.failover.command",
    "osu_bench.training.command",
    "osu_bench.report.command",
)
OTHERS = {
    "codec_speed": "codecs on one core, against others' libraries",
    "overhead": "what the layer costs where it cannot win",
    "ddp_cost": "what a step of PyTorch's DDP costs, against gloo",
    "monitor_cost": "what the monitor costs",
    "any_order": "collectives that ranks start in different orders",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what `argv` (the program's own arguments where it is None) says, and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] and arguments[0] in OTHERS:
        return _other(arguments)
    flags = _parser().parse_args(arguments, Flags())
    try:
        return int(_run(flags))
    except GpucompError as error:
        return _fail(error, flags)
    except KeyboardInterrupt:
        return 130
    except Exception:
        if not hasattr(flags, "benchmark"):
            raise
        traceback.print_exc()
        return _end_all(1)


def _run(flags: Flags) -> int:
    if not hasattr(flags, "benchmark"):
        return int(flags.run(flags))
    benchmark = BENCHMARKS[flags.benchmark]
    module = importlib.import_module(f"osu_bench.{benchmark.module}")
    flags.defaults = getattr(module, benchmark.defaults)
    code: int = getattr(module, benchmark.function)(flags)
    return code


def _fail(error: GpucompError, flags: Flags) -> int:
    """Say it once; ranks that still wait for this one are ended."""
    print(f"osu_bench: {error}", file=sys.stderr, flush=True)
    return _end_all(2) if hasattr(flags, "benchmark") else 2


def _end_all(code: int) -> int:
    """End the other ranks too, which wait for this one."""
    from mpi4py import MPI

    if MPI.COMM_WORLD.size > 1:
        MPI.COMM_WORLD.Abort(code)
    return code


def _other(arguments: list[str]) -> int:
    """Run one of the programs that have a command line of their own."""
    module = importlib.import_module(f"osu_bench.{arguments[0]}")
    sys.argv = [f"osu_bench {arguments[0]}", *arguments[1:]]
    return int(module.main() or 0)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="osu_bench", description="Benchmarks in the manner of the OSU micro-benchmarks.")
    parser.add_argument("-v", "--version", action="version", version=f"mpi_gpucomp {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="NAME")
    for name, benchmark in BENCHMARKS.items():
        own = commands.add_parser(name, help=benchmark.help, description=f"Measure {benchmark.help}.")
        own.add_argument("-v", "--version", action="version", version=f"mpi_gpucomp {__version__}")
        add_flags(own, windows=benchmark.windows, nonblocking=benchmark.nonblocking, pairs=benchmark.pairs)
        own.set_defaults(benchmark=name)
    for module in COMMANDS:
        importlib.import_module(module).add(commands)
    for name, text in OTHERS.items():
        commands.add_parser(name, help=text)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong once, not on every rank."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """Print usage and error on the first rank alone; launchers end all with the first that fails: others wait."""
        if _launched_rank() == 0:
            super().error(message)
        time.sleep(FIRST_RANK_SPEAKS)
        sys.exit(2)


def _launched_rank() -> int:
    """Return this process's rank by what launchers put into the environment, before MPI is started."""
    names = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), 0)
