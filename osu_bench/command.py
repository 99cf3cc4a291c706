"""The command line: `osu_bench NAME` runs a benchmark of the suite, a tool or an experiment.

Exit codes: 0 success, 1 a wrong result, 2 an error in the request or the environment, 130 interrupted.
Only the selected command is imported, and MPI is initialised only by commands that measure.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp import __version__
from mpi_gpucomp.errors import GpucompError
from osu_bench.arguments import CommandParser

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BENCHMARKS", "COMMANDS", "main"]


class Benchmark(NamedTuple):
    """A benchmark of the suite: the function that runs it, and the flags that it has."""

    module: str
    function: str
    defaults: str
    help: str
    ranks: int = 4
    """Ranks in the example of its help."""
    windows: bool = False
    pairs: bool = False
    nonblocking: bool = False


COLLECTIVES = ("bcast", "reduce", "allreduce", "allgather", "reduce_scatter", "alltoall", "gather", "scatter")
BENCHMARKS = {
    "latency": Benchmark("point_to_point", "latency", "LATENCY", "half a round trip between two ranks", 2),
    "bw": Benchmark("point_to_point", "bandwidth", "BANDWIDTH", "unidirectional bandwidth", 2, windows=True),
    "bibw": Benchmark("point_to_point", "bandwidth", "BANDWIDTH", "bidirectional bandwidth", 2, windows=True),
    "mbw_mr": Benchmark(
        "point_to_point", "message_rate", "BANDWIDTH", "bandwidth and message rate of pairs", windows=True, pairs=True
    ),
    **{name: Benchmark("collectives", "collective", "DEFAULTS", f"latency of {name}") for name in COLLECTIVES},
    "barrier": Benchmark("collectives", "barrier", "DEFAULTS", "latency of barrier"),
    **{
        f"i{name}": Benchmark(
            "collectives", "overlap", "DEFAULTS", f"overlap of non-blocking {name} with computation", nonblocking=True
        )
        for name in COLLECTIVES
    },
}


class Command(NamedTuple):
    """A tool or experiment: the module whose `main` runs it."""

    module: str
    help: str


TOOLS = {
    "demo": Command("demo", "native MPI against our codecs on four hosts of this machine: start here"),
    "cluster": Command("cluster.command", "hosts on this machine, joined by links of a chosen rate"),
    "report": Command("report.command", "make an HTML page of results"),
    "headline": Command("experiments.headline", "compare all candidates on clusters of several rates"),
}
EXPERIMENTS = {
    "any_order": Command("experiments.any_order", "collectives that ranks start in different orders"),
    "chunk_cost": Command("experiments.chunk_cost", "processor time of the engine for each chunk"),
    "codec_speed": Command("experiments.codec_speed", "codec throughput on one core, against other libraries"),
    "ddp_cost": Command("experiments.ddp_cost", "time of a PyTorch DDP step, against gloo"),
    "failover": Command("experiments.failover", "cut links during operations on rails and measure the cost"),
    "monitor_cost": Command("experiments.monitor_cost", "overhead of the monitor"),
    "monitor_faults": Command("experiments.monitor_faults", "inject faults and time their detection"),
    "overhead": Command("experiments.overhead", "overhead of the library over mpi4py"),
    "simulation_vs_cluster": Command("experiments.simulation_vs_cluster", "simulated against measured times"),
    "synthesis_scaling": Command("experiments.synthesis_scaling", "synthesis time against the number of ranks"),
    "synthesis_vs_builtin": Command("experiments.synthesis_vs_builtin", "synthesised against built-in algorithms"),
    "training": Command("experiments.training.command", "train a model with compressed parameters and gradients"),
    "training_versions": Command("experiments.training.versions", "ratios of successive versions of parameters"),
}
COMMANDS = TOOLS | EXPERIMENTS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (the program's arguments if None) and return the exit code."""
    name, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name not in BENCHMARKS and name not in COMMANDS:
        _parser().parse_args([name])
    try:
        return _benchmark(name, arguments) if name in BENCHMARKS else _command(name, arguments)
    except GpucompError as error:
        print(f"osu_bench: {error}", file=sys.stderr, flush=True)
        return _abort(2)
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        return _abort(1)


def _command(name: str, arguments: list[str]) -> int:
    module = importlib.import_module(f"osu_bench.{COMMANDS[name].module}")
    return int(module.main(arguments) or 0)


def _benchmark(name: str, arguments: list[str]) -> int:
    from osu_bench.suite.flags import Flags

    benchmark = BENCHMARKS[name]
    flags = benchmark_parser(name).parse_args(arguments, Flags())
    module = importlib.import_module(f"osu_bench.suite.{benchmark.module}")
    flags.defaults = getattr(module, benchmark.defaults)
    code: int = getattr(module, benchmark.function)(flags)
    return code


def benchmark_parser(name: str) -> CommandParser:
    """Return the parser of a benchmark's flags."""
    from osu_bench.suite.flags import add_flags

    benchmark = BENCHMARKS[name]
    example = f"mpirun -n {benchmark.ranks} osu_bench {name} -m 1K:4M --codec split"
    parser = CommandParser(f"osu_bench {name}", f"Measure {benchmark.help}.", example)
    _add_version(parser)
    add_flags(parser, windows=benchmark.windows, nonblocking=benchmark.nonblocking, pairs=benchmark.pairs)
    parser.set_defaults(benchmark=name)
    return parser


def _abort(code: int) -> int:
    """Return the exit code; where MPI runs, abort the job first, because other ranks may wait for this one."""
    if sys.modules.get("mpi4py.MPI"):
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1:
            MPI.COMM_WORLD.Abort(code)
    return code


def _parser() -> CommandParser:
    """Return a parser that prints the help of all commands, and refuses any other name."""
    parser = CommandParser(
        "osu_bench", "Benchmarks in the style of the OSU micro-benchmarks, with every result verified.", _EXAMPLES
    )
    _add_version(parser)
    commands = parser.add_subparsers(title="commands", required=True, metavar="NAME", parser_class=CommandParser)
    listed: dict[str, Benchmark | Command] = {**TOOLS, **BENCHMARKS, **EXPERIMENTS}
    for name, command in listed.items():
        commands.add_parser(name, help=command.help)
    return parser


def _add_version(parser: CommandParser) -> None:
    parser.add_argument("-v", "--version", action="version", version=f"mpi_gpucomp {__version__}")


_EXAMPLES = """\
osu_bench demo
mpirun -n 4 osu_bench bcast -m 1M:64M --compare mpi,none,split
osu_bench cluster up --hosts 4 --rate 1gbit
osu_bench cluster run -- osu_bench bcast -m 64M:64M --compare mpi,none,split"""
