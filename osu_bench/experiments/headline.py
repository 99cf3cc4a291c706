"""The command `headline`: compare all candidates on clusters of several sizes and rates, and write a report.

Each comparison is one run in which the candidates alternate. Results are saved after each, so that an interrupted sweep
can be resumed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from osu_bench.arguments import CommandParser, message_size, names, number
from osu_bench.arguments import sizes as powers_of_two
from osu_bench.cluster import rootless
from osu_bench.cluster.network import parse_rate
from osu_bench.suite.results import Results, load

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from osu_bench.cluster.cluster import Cluster
    from osu_bench.suite.results import Run

__all__ = ["Conditions", "Job", "jobs", "main"]

ALL_DATA = ("weights", "weights-bf16", "gradients", "smooth")
BOUNDS = {"weights": 2e-4, "weights-bf16": 2e-4, "gradients": 2.9e-5, "smooth": 7.8e-3}
"""One percent of each standard deviation."""
PER_MESSAGE = ("p2p:zfp:rate=8", "p2p-chain:zfp:rate=8")
LONGEST_SECONDS = 9
"""Limit of the expected time of native MPI's default broadcast; longer messages are skipped."""


@dataclass(frozen=True)
class Conditions:
    """The size and rate of a cluster."""

    hosts: int
    rate: str

    def __str__(self) -> str:
        """Format the conditions."""
        return f"{self.hosts} hosts, {self.rate}"


@dataclass(frozen=True)
class Job:
    """One comparison."""

    benchmark: str
    data: str
    candidates: tuple[str, ...]
    sizes: tuple[int, ...]
    mpi: str = "openmpi"

    def arguments(self, seconds: float, path: Path) -> list[str]:
        """Return the command line of the benchmark."""
        return [
            *(self.benchmark, "--data", self.data, "--compare", ",".join(self.candidates)),
            *("-m", f"{self.sizes[0]}:{self.sizes[-1]}", "--step", "4", "-M", "2G", "-x", "1", "-i", "49"),
            *("--seconds", str(seconds), "--columns", "ratio,limit,note", "--json", str(path)),
        ]

    def is_in(self, run: Run, conditions: Conditions) -> bool:
        """Return True if a run is this comparison, complete."""
        same = (run.benchmark, run.data, run.ranks) == (self.benchmark, self.data, conditions.hosts)
        of_mpi = run.mpi.startswith("MPICH") == (self.mpi == "mpich")
        there = run.network is not None and run.network.rate == parse_rate(conditions.rate)
        return same and of_mpi and there and set(self.candidates) <= set(run.candidates()) and _complete(run, self)


def _complete(run: Run, job: Job) -> bool:
    return set(job.sizes) <= set(run.sizes())


def jobs(conditions: Conditions, sizes: tuple[int, ...], data: tuple[str, ...], *, mpich: bool) -> Iterator[Job]:
    """Iterate over the comparisons on a cluster."""
    for kind in data:
        bound = f"bound:abs={BOUNDS[kind]}"
        coded = ("zfp:rate=4", "zfp:rate=8", "zfp:rate=16", bound, "split", "auto")
        # Candidates that ignore the data run once; mpi-tuned runs always, as the baseline.
        baselines = ("mpi", "mpi-tuned", "gloo", "none", *PER_MESSAGE) if kind == data[0] else ("mpi-tuned",)
        yield Job("bcast", kind, (*baselines, *coded), sizes)
    if mpich:
        candidates = ("mpi", "mpi-tuned", "none", "zfp:rate=8", "split", "auto")
        yield Job("bcast", data[0], candidates, sizes, "mpich")
    bound = f"bound:abs={BOUNDS['gradients']}"
    for benchmark in ("allreduce", "allgather"):
        parts = conditions.hosts if benchmark == "allgather" else 1
        some = tuple(size // parts for size in sizes)
        yield Job(benchmark, "gradients", ("mpi", "mpi-tuned", "none", bound, "split", "auto"), some)


EXAMPLE = """\
osu_bench headline
osu_bench headline --rates 1gbit,5gbit --data weights,gradients"""


def main(argv: Sequence[str] | None = None) -> int:
    """Make clusters, run the comparisons on each, and write a report."""
    parser = CommandParser(
        "osu_bench headline",
        "Make clusters on this machine, compare all candidates on each, write a report, and remove the clusters.",
        EXAMPLE,
    )
    parser.add_argument("--hosts", type=names, default=["4"], metavar="A,B", help="numbers of hosts (4)")
    parser.add_argument(
        "--rates", type=names, default=["1gbit"], metavar="A,B", help="0.5gbit, 1gbit, unlimited (1gbit)"
    )
    parser.add_argument(
        "-m",
        "--message-size",
        type=message_size,
        default=(1 << 26, 1 << 26),
        metavar="[MIN:]MAX",
        help="bytes of the messages (64M)",
    )
    parser.add_argument(
        "--data",
        type=names,
        default=["weights", "weights-bf16"],
        metavar="A,B",
        help="as in the suite (weights,weights-bf16)",
    )
    parser.add_argument("--full", action="store_true", help="4 and 8 hosts, all rates, 1 to 256 MB, all data: hours")
    parser.add_argument("--seconds", type=float, default=10.0, help="per size, unless 4 rounds take longer (10)")
    parser.add_argument("--mpich", metavar="PREFIX", help="prefix of an MPICH installation, to measure it too")
    parser.add_argument("-o", "--output", type=Path, default=Path("headline"), help="folder of the results (headline)")
    parser.add_argument("--resume", action="store_true", help="skip comparisons that the folder has already")
    words = list(sys.argv[2:] if argv is None else argv)
    args = parser.parse_args(words)
    rootless.enter("headline", *words)
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    from osu_bench.cluster.cluster import Cluster
    from osu_bench.report.command import write

    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "results.json"
    if path.exists() and not args.resume:
        path.unlink()
    for conditions in _conditions(args):
        todo = [job for job in _jobs(args, conditions) if not _done(path, job, conditions)]
        if not todo:
            continue
        with Cluster.up(conditions.hosts, conditions.rate) as cluster:
            for job in todo:
                print(f"\n== {conditions}, {job.mpi}: {job.benchmark} of {job.data}", flush=True)
                _compare(cluster, job, args, path)
    return int(write([path], args.output / "report.html"))


def _conditions(args: argparse.Namespace) -> Iterator[Conditions]:
    hosts = ["4", "8"] if args.full else args.hosts
    rates = ["1gbit", "5gbit", "unlimited", "0.5gbit"] if args.full else args.rates
    for several in hosts:
        for rate in rates:
            yield Conditions(number(several), rate)


def _jobs(args: argparse.Namespace, conditions: Conditions) -> Iterator[Job]:
    least, most = (1 << 20, 1 << 28) if args.full else args.message_size
    sizes = tuple(size for size in powers_of_two(least or most, most, step=4) if not _too_long(size, conditions))
    return jobs(conditions, sizes, ALL_DATA if args.full else tuple(args.data), mpich=args.mpich is not None)


def _too_long(size: int, conditions: Conditions) -> bool:
    """Return True if a broadcast without pipelining would take too long."""
    rate = parse_rate(conditions.rate)
    return rate is not None and size * 8 / rate * conditions.hosts > LONGEST_SECONDS


def _done(path: Path, job: Job, conditions: Conditions) -> bool:
    runs = load(path).runs if path.exists() else Results().runs
    return any(job.is_in(run, conditions) for run in runs)


def _compare(cluster: Cluster, job: Job, args: argparse.Namespace, path: Path) -> None:
    """Run one comparison; a failure is printed and does not stop the sweep."""
    program = [sys.executable, "-m", "osu_bench", *job.arguments(args.seconds, path.resolve())]
    done = cluster.run(program, mpi=job.mpi, mpich=args.mpich if job.mpi == "mpich" else None)
    if done.returncode in (130, -2):
        raise KeyboardInterrupt
    if done.returncode:
        print(f"osu_bench: {job.benchmark} of {job.data} ended with exit code {done.returncode}", file=sys.stderr)
