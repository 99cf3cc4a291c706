"""Synthesised schedules against built-in algorithms, on a heterogeneous cluster of this machine.

    osu_bench synthesis_vs_builtin --hosts 8 --rate 400mbit --racks 3 --uplink 200mbit
    osu_bench synthesis_vs_builtin --hosts 2 --rate 200mbit --per-host 4
    osu_bench synthesis_vs_builtin --hosts 4 --rate 400mbit --slow-host 100mbit

The network is profiled and a schedule synthesised for it. It alternates with native MPI (default and tuned) and with
every built-in algorithm.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.cli.command import table
from mpi_gpucomp.schedule.algorithms import algorithms
from osu_bench.arguments import CommandParser, names, number
from osu_bench.cluster import Cluster, rootless
from osu_bench.suite.results import load

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

COLLECTIVES = {"bcast": "broadcast", "allreduce": "allreduce", "allgather": "allgather"}
NATIVE = ("mpi", "mpi-tuned")
HEADER = ("", "native MPI (ms)", "built-in (ms)", "", "synthesised (ms)", "ratio to best")


class Times(NamedTuple):
    """Medians of one collective, in seconds, by candidate."""

    benchmark: str
    synthesised: float
    others: dict[str, float]

    @property
    def row(self) -> tuple[str, ...]:
        """The fastest of each kind, and the ratio of the synthesised schedule to the fastest of all."""
        own = min(seconds for name, seconds in self.others.items() if name in NATIVE)
        name, best = min(((n, s) for n, s in self.others.items() if n not in NATIVE), key=lambda pair: pair[1])
        share = self.synthesised / min(own, best)
        shown = _ms(own), _ms(best), name.partition("@")[2], _ms(self.synthesised)
        return self.benchmark, *shown, f"{share:.2f} ({1 / share:.1f}x)"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


def measure(cluster: Cluster, benchmark: str, args: argparse.Namespace, folder: Path) -> Times:
    """Synthesise a schedule for the profiled network and compare it with the others."""
    ranks = args.hosts * args.per_host
    made, results = folder / f"{benchmark}.xml", folder / "results.json"
    options = ("--topology", str(folder / "topology.json"), "--size", str(args.message_size), "-o", str(made))
    _local("mpi_gpucomp", "synthesize", benchmark, *options)
    known = [f"none@{one.name}" for one in algorithms(COLLECTIVES[benchmark])]
    candidates = [*NATIVE, *known, f"none@{made}"]
    size = args.message_size // (ranks if benchmark == "allgather" else 1)
    repeated = ("-m", f"{size}:{size}", "-i", str(args.rounds), "-x", "1", "--json", str(results))
    _on(cluster, args, "osu_bench", benchmark, *repeated, "--compare", ",".join(candidates))
    times = {row.candidate: median(row.times_us) / 1e6 for row in load(results).runs[-1].rows}
    return Times(benchmark, times.pop(candidates[-1]), times)


def _local(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)


def _on(cluster: Cluster, args: argparse.Namespace, module: str, *arguments: str) -> None:
    done = cluster.run([sys.executable, "-m", module, *arguments], per_host=args.per_host)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, [module, *arguments])


EXAMPLE = "osu_bench synthesis_vs_builtin --hosts 8 --rate 400mbit --racks 3 --uplink 200mbit"


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each collective."""
    parser = CommandParser("osu_bench synthesis_vs_builtin", (__doc__ or "").splitlines()[0], EXAMPLE)
    parser.add_argument("--hosts", type=int, default=8, help="(8)")
    parser.add_argument("--per-host", type=int, default=1, metavar="N", help="ranks on each host (1)")
    parser.add_argument("--rate", default="400mbit", help="of each link (400mbit)")
    parser.add_argument("--racks", type=int, default=1, help="(1)")
    parser.add_argument("--uplink", default=None, metavar="RATE", help="of each rack (unlimited)")
    parser.add_argument("--slow-host", default=None, metavar="RATE", help="of the link of host 2")
    parser.add_argument(
        "--collectives", type=names, default=list(COLLECTIVES), metavar="A,B", help="collectives to compare (all)"
    )
    parser.add_argument("-m", "--message-size", type=number, default=8 << 20, metavar="BYTES", help="in total (8M)")
    parser.add_argument("-i", "--rounds", type=int, default=5, help="measured rounds (5)")
    words = list(sys.argv[2:] if argv is None else argv)
    args = parser.parse_args(words)
    rootless.enter("synthesis_vs_builtin", *words)
    up = Cluster.up(args.hosts, args.rate, racks=args.racks, uplink=args.uplink, name="synthesis")
    with up as cluster, tempfile.TemporaryDirectory() as folder:
        if args.slow_host:
            cluster.set_rate(args.slow_host, host=2)
        _on(cluster, args, "mpi_gpucomp", "profile", "-o", f"{folder}/topology.json")
        found = [measure(cluster, benchmark, args, Path(folder)) for benchmark in args.collectives]
    print(table(HEADER, [times.row for times in found], right=(HEADER[1], HEADER[2], HEADER[4])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
