"""Simulated against measured times: each cluster is profiled, simulated and measured in one run.

osu_bench simulation_vs_cluster --hosts 4,8 --rates 200mbit,1gbit -m 16M
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.cli.command import table
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.schedule.cost import default_chunk_bytes
from mpi_gpucomp.schedule.simulate import simulate
from mpi_gpucomp.schedule.topology import read_topology
from osu_bench.arguments import CommandParser, names, number
from osu_bench.cluster import Cluster, rootless
from osu_bench.suite.results import load

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["main"]

HEADER = ("hosts", "rate", "collective", "codec", "simulated (ms)", "measured (ms)", "error")
CODECS = ("none", "zfp:rate=8")
ALGORITHMS = {"bcast": ("broadcast", "chain"), "allreduce": ("allreduce", "ring")}


class Compared(NamedTuple):
    """Seconds of a collective, simulated and measured."""

    benchmark: str
    codec: str
    simulated: float
    measured: float


def seconds_of(topology: Topology, benchmark: str, codec: str, nbytes: int) -> float:
    """Simulate a collective with a communicator's default chunk size."""
    collective, algorithm = ALGORITHMS[benchmark]
    chunk = default_chunk_bytes(nbytes, coded=codec != "none")
    coding = None if codec == "none" else topology.codecs[codec]
    return float(simulate(build(collective, algorithm, topology.ranks), topology, nbytes, chunk, coding).seconds)


def compare(cluster: Cluster, nbytes: int, rounds: int, folder: Path) -> Iterator[Compared]:
    """Profile a cluster, then simulate and measure on it."""
    profile, results = folder / "topology.json", folder / "results.json"
    _run(cluster, "mpi_gpucomp", "profile", "-o", str(profile))
    topology = read_topology(profile)
    for benchmark, (_, algorithm) in ALGORITHMS.items():
        size = ("-m", f"{nbytes}:{nbytes}", "-i", str(rounds), "-x", "1")
        candidates = ",".join(f"{codec}@{algorithm}" for codec in CODECS)
        _run(cluster, "osu_bench", benchmark, *size, "--compare", candidates, "--json", str(results))
        rows = {row.candidate: row for row in load(results).runs[-1].rows}
        for codec in CODECS:
            measured = median(rows[f"{codec}@{algorithm}"].times_us) / 1e6
            yield Compared(benchmark, codec, seconds_of(topology, benchmark, codec, nbytes), measured)


def _run(cluster: Cluster, module: str, *arguments: str) -> None:
    done = cluster.run([sys.executable, "-m", module, *arguments])
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, [module, *arguments])


EXAMPLE = "osu_bench simulation_vs_cluster --hosts 4,8 --rates 200mbit,1gbit -m 16M"


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each collective and codec on each cluster."""
    parser = CommandParser("osu_bench simulation_vs_cluster", (__doc__ or "").splitlines()[0], EXAMPLE)
    parser.add_argument("--hosts", type=names, default=["4", "8"], metavar="A,B", help="(4,8)")
    parser.add_argument("--rates", type=names, default=["200mbit", "1gbit"], metavar="A,B", help="(200mbit,1gbit)")
    parser.add_argument("-m", "--message-size", type=number, default=1 << 24, metavar="BYTES", help="(16M)")
    parser.add_argument("-i", "--rounds", type=int, default=5, help="measured rounds (5)")
    words = list(sys.argv[2:] if argv is None else argv)
    args = parser.parse_args(words)
    rootless.enter("simulation_vs_cluster", *words)
    rows = []
    for rate in args.rates:
        for hosts in args.hosts:
            with Cluster.up(number(hosts), rate, name="simulated") as cluster, tempfile.TemporaryDirectory() as folder:
                for one in compare(cluster, args.message_size, args.rounds, Path(folder)):
                    off = one.simulated / one.measured - 1
                    shown = f"{one.simulated * 1e3:.0f}", f"{one.measured * 1e3:.0f}", f"{off:+.0%}"
                    rows.append((hosts, rate, one.benchmark, one.codec, *shown))
    print(table(HEADER, rows, right=HEADER[4:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
