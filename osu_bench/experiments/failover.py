"""The command `failover`: cut links during operations on rails, measure the cost, and compare with native MPI."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi_gpucomp.cli.command import table
from osu_bench.arguments import CommandParser, message_size, names
from osu_bench.cluster import rootless
from osu_bench.cluster.network import parse_rate

if TYPE_CHECKING:
    import argparse
    from types import TracebackType

    from osu_bench.cluster.cluster import Cluster

__all__ = [
    "NATIVE",
    "Cut",
    "Job",
    "Operation",
    "Outcome",
    "cut_and_heal",
    "main",
    "measure",
    "outcome",
    "progress_limit",
]


BEFORE, MEANWHILE, BETWEEN = 4, 3, 2
"""Operations before the first cut, during a cut, and after healing."""
LIMIT, SLOWEST = 60.0, 4
"""Seconds in which ranks must make progress, or this multiple of the time of operations that send a message twice."""


class Cut(NamedTuple):
    """The times at which a link was cut and healed."""

    how: str | float
    at: float
    healed: float


class Outcome(NamedTuple):
    """The cost of the cuts of one kind."""

    how: str
    cuts: int
    wrong: int
    """Operations with wrong results."""
    undisturbed: float
    """Seconds of an operation without a cut."""
    lost: list[float]
    """For each cut, the additional seconds of the operations that it hit."""
    after: float
    """Seconds of an operation during a cut, after failover."""

    @property
    def share(self) -> float:
        """Return the bandwidth during a cut as a share of the normal bandwidth."""
        return self.undisturbed / self.after if self.after else 0.0


def progress_limit(nbytes: int, rate: float | None) -> float:
    """Return the time limit for progress, given the message size and the rate."""
    operation = 2 * nbytes * 8 / rate if rate else 0.0
    return max(LIMIT, SLOWEST * BEFORE * operation)


def cut_and_heal(
    cluster: Cluster, ranks: Job, how: str | float, draw: random.Random, host: int, limit: float = LIMIT
) -> Cut | None:
    """Cut a link of the first rail at a random moment, heal it after progress, and wait for all paths.

    Return None if the ranks make no progress within `limit` seconds.
    """
    pause = draw.uniform(0, ranks.operations[-1].seconds)
    time.sleep(pause)
    at = time.monotonic()
    cluster.cut(host, 0, how)
    on = ranks.more(MEANWHILE, limit)
    healed = time.monotonic()
    cluster.heal(host, 0)
    back = on and ranks.more(1, limit) and ranks.whole(limit) and ranks.more(BETWEEN, limit)
    return Cut(how, at, healed) if back else None


def measure(
    cluster: Cluster,
    ranks: Job,
    kinds: list[str | float],
    cuts: int,
    seed: int,
    hosts: list[int],
    limit: float = LIMIT,
) -> list[Cut]:
    """Make `cuts` cuts, alternating between kinds; fewer if the ranks make no progress."""
    draw = random.Random(seed)
    made: list[Cut] = []
    if ranks.wait(BEFORE, limit):
        for number in range(cuts):
            cut = cut_and_heal(cluster, ranks, kinds[number % len(kinds)], draw, draw.choice(hosts), limit)
            if cut is None:
                break
            made.append(cut)
    return made


def outcome(how: str | float, cuts: list[Cut], operations: list[Operation]) -> Outcome:
    """Compute the cost of the cuts of one kind."""
    own = [cut for cut in cuts if cut.how == how]
    usual = median(operation.seconds for operation in operations if not any(_touches(operation, cut) for cut in cuts))
    hit = [
        [operation for operation in operations if operation.start <= cut.at + usual and operation.all >= cut.at]
        for cut in own
    ]
    lost = [sum(operation.seconds - usual for operation in some) for some in hit]
    settled = [operation.seconds for cut in own for operation in operations if _is_within(operation, cut, usual)]
    name = f"loss {how:g} %" if isinstance(how, float) else how
    wrong = sum(operation.wrong > 0 for operation in operations)
    return Outcome(name, len(own), wrong, usual, lost, median(settled) if settled else 0.0)


def _touches(operation: Operation, cut: Cut) -> bool:
    return operation.start < cut.healed and operation.all > cut.at


def _is_within(operation: Operation, cut: Cut, usual: float) -> bool:
    """Return True if an operation ran entirely during a cut, after the first."""
    return operation.start > cut.at + usual / 2 and operation.all < cut.healed


NATIVE = "native"
"""In place of devices: native MPI."""
NAP = 0.005


class Operation(NamedTuple):
    """One operation, timed by the machine's clock."""

    start: float
    end: float
    """When rank 0 completed it."""
    all: float
    """When all ranks had completed it."""
    wrong: int
    missing: int = 0
    """Paths that are down or not yet used again, summed over ranks."""

    @property
    def seconds(self) -> float:
        """Seconds until all ranks had completed it."""
        return self.all - self.start


class Job:
    """Ranks that run one operation in a loop on a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        operation: str,
        nbytes: int,
        devices: str,
        timeout: float = 0.5,
        limit: float = 30.0,
        *,
        wire: str = "tcp",
        mpi: str = "openmpi",
        mpich: str | Path | None = None,
    ) -> None:
        """Start the ranks; devices are those of the rails, or NATIVE."""
        self.operations: list[Operation] = []
        self.reports: list[dict[str, Any]] = []
        """Other reports of ranks: errors, and failovers of their paths."""
        self._folder = tempfile.TemporaryDirectory()
        self._stop = Path(self._folder.name) / "stop"
        words = (operation, str(nbytes), devices, str(timeout), str(limit), wire, str(self._stop))
        program = [sys.executable, "-m", "osu_bench.experiments.failover_ranks", *words]
        self.running = cluster.start(program, mpi, capture=True, mpich=mpich)
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.running.process.stdout is not None
        for line in self.running.process.stdout:
            try:
                report = json.loads(line)
            except ValueError:
                self.errors.append(line)
                continue
            if "turn" in report:
                self.operations.append(
                    Operation(report["start"], report["end"], report["all"], report["wrong"], report["missing"])
                )
            else:
                self.reports.append(report)

    def _read_errors(self) -> None:
        assert self.running.process.stderr is not None
        self.errors += self.running.process.stderr

    def wait(self, operations: int, seconds: float = 60.0) -> bool:
        """Wait until this many operations have completed; return True if they have."""
        until = time.monotonic() + seconds
        while len(self.operations) < operations and time.monotonic() < until and self.running.poll() is None:
            time.sleep(NAP)
        return len(self.operations) >= operations

    def more(self, operations: int, seconds: float = 60.0) -> bool:
        """Wait for this many operations that begin from now on."""
        now, until = time.monotonic(), time.monotonic() + seconds
        while time.monotonic() < until and self.running.poll() is None:
            if sum(operation.start > now for operation in self.operations[-operations - 1 :]) >= operations:
                return True
            time.sleep(NAP)
        return False

    def whole(self, seconds: float = 60.0) -> bool:
        """Wait until all paths are up."""
        until = time.monotonic() + seconds
        while self.operations[-1].missing and time.monotonic() < until and self.running.poll() is None:
            time.sleep(NAP)
        return not self.operations[-1].missing

    def finish(self, seconds: float = 60.0) -> int | None:
        """Stop the ranks and return their exit code; None if they do not stop."""
        self._stop.touch()
        until = time.monotonic() + seconds
        while self.running.poll() is None and time.monotonic() < until:
            time.sleep(NAP)
        code = self.running.poll()
        self.end()
        return code

    def end(self) -> None:
        """End the ranks."""
        self.running.end()
        for thread in self._threads:
            thread.join(10)
        self._folder.cleanup()

    def __enter__(self) -> Job:
        """Return this object."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the ranks."""
        self.end()


WIRES = "tcp", "ucx", "auto"
"""The wires of `Rails`; importing them would initialise MPI."""
HEADER = ("operation", "cut", "cuts", "wrong", "normal ms", "lost ms", "max lost ms", "bandwidth during")
OBSERVED_SECONDS = 20.0
"""Seconds for which native MPI is observed after a cut."""


EXAMPLE = """\
osu_bench failover --operations bcast --cuts 6"""


def main(argv: Sequence[str] | None = None) -> int:
    """Cut links during operations on rails, and print what each cut cost."""
    parser = CommandParser(
        "osu_bench failover", "Cut links during operations on rails, and measure what each cut costs.", EXAMPLE
    )
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (2)")
    parser.add_argument("--rate", default="1gbit", help="of each link (1gbit)")
    parser.add_argument("--rails", default="eth0,eth1", help="devices (eth0,eth1: the second is the backup)")
    parser.add_argument("--wire", choices=WIRES, default="tcp", help="transport of the rails (tcp)")
    parser.add_argument(
        "--operations",
        type=names,
        default=["bcast", "allreduce", "send"],
        metavar="A,B",
        help="bcast,allreduce,send (default)",
    )
    parser.add_argument(
        "--how", type=names, default=["down", "silent", "1"], metavar="A,B", help="down, silent or a loss percentage"
    )
    parser.add_argument("--cuts", type=int, default=12, help="per operation (12)")
    parser.add_argument(
        "-m",
        "--message-size",
        type=message_size,
        default=(1 << 26, 1 << 26),
        metavar="BYTES",
        help="bytes of the messages (64M)",
    )
    parser.add_argument("--timeout", type=float, default=0.5, help="failure detection timeout in seconds (0.5)")
    parser.add_argument("--limit", type=float, help="seconds in which ranks must make progress (60 or more)")
    parser.add_argument("--seed", type=int, default=1, help="random seed of the moments of the cuts")
    parser.add_argument("--native", action="store_true", help="cut under native MPI too, once for each kind")
    parser.add_argument("--mpich", metavar="PREFIX", help="prefix of an MPICH installation, for --native")
    parser.add_argument("--name", default="failover", help="of the cluster")
    words = list(sys.argv[2:] if argv is None else argv)
    args = parser.parse_args(words)
    rootless.enter("failover", *words)
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    from osu_bench.cluster.cluster import Cluster

    args.limit = args.limit or progress_limit(args.message_size[1], parse_rate(args.rate))
    kinds: list[str | float] = [float(how) if how[0].isdigit() else how for how in args.how]
    code = 0
    with Cluster.up(args.hosts, args.rate, 2, name=args.name) as cluster:
        rows = []
        for operation in args.operations:
            found, fine = _on_rails(cluster, args, operation, kinds)
            code |= not fine
            rows += [_row(operation, one) for one in found]
        print(
            f"\nRails {args.rails} ({args.wire}), {args.hosts} hosts, {args.rate}, {args.message_size[1]} bytes, ",
            end="",
        )
        print(f"timeout {args.timeout:g} s, seed {args.seed}\n\n{table(HEADER, rows)}", flush=True)
        for mpi in ["openmpi", *(["mpich"] if args.mpich else [])] if args.native else []:
            for operation in args.operations:
                for how in kinds:
                    print(
                        f"native {mpi}, {operation}, {how}: {_native_outcome(cluster, args, mpi, operation, how)}",
                        flush=True,
                    )
    return code


def _on_rails(
    cluster: Cluster, args: argparse.Namespace, operation: str, kinds: list[str | float]
) -> tuple[list[Outcome], bool]:
    hosts = [0, 1] if operation == "send" else list(range(args.hosts))
    with Job(cluster, operation, args.message_size[1], args.rails, args.timeout, wire=args.wire) as ranks:
        cuts = measure(cluster, ranks, kinds, args.cuts, args.seed, hosts, args.limit)
        code = ranks.finish(args.limit)
    complete = len(cuts) == args.cuts and code == 0 and not any(operation.wrong for operation in ranks.operations)
    if not complete:
        print(
            f"{operation}: exit code {code} after {len(cuts)} cuts",
            *ranks.errors[-20:],
            *ranks.reports,
            file=sys.stderr,
        )
    found = _outcomes(kinds, cuts, ranks)
    return found, complete


def _outcomes(kinds: list[str | float], cuts: list[Cut], ranks: Job) -> list[Outcome]:
    return [outcome(how, cuts, ranks.operations) for how in kinds if any(cut.how == how for cut in cuts)]


def _row(operation: str, one: Outcome) -> tuple[str, ...]:
    lost = [f"{1e3 * seconds:.0f}" for seconds in (median(one.lost), max(one.lost))]
    return (
        operation,
        one.how,
        str(one.cuts),
        str(one.wrong),
        f"{1e3 * one.undisturbed:.0f}",
        *lost,
        f"{one.share:.0%}",
    )


def _native_outcome(cluster: Cluster, args: argparse.Namespace, mpi: str, operation: str, how: str | float) -> str:
    """Cut once under native MPI and describe the outcome."""
    mpich = args.mpich if mpi == "mpich" else None
    with Job(cluster, operation, args.message_size[1], NATIVE, mpi=mpi, mpich=mpich) as ranks:
        if not ranks.wait(3, args.limit):
            return "the job did not start"
        usual = min(operation.seconds for operation in ranks.operations)
        cluster.cut(1, 0, how)
        time.sleep(usual)
        on = ranks.more(2, OBSERVED_SECONDS)
        code = ranks.running.poll()
        cluster.heal()
        if code is not None:
            return f"the job ended with exit code {code}"
        again = ranks.more(2, OBSERVED_SECONDS)
        if on:
            slowest = max(each.seconds for each in ranks.operations)
            return f"continued, slowest operation {slowest:.2f} s (normally {usual:.2f} s)"
        return f"hung for {OBSERVED_SECONDS:.0f} s, {'continued' if again else 'still hung'} after the link was healed"
