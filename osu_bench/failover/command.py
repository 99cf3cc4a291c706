"""The command `failover`: what a cut costs on rails, and what becomes of an MPI without them."""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.cli.output import table
from osu_bench.cluster.rate import parse_rate
from osu_bench.failover.cuts import measure, outcome, patience
from osu_bench.failover.watching import PLAIN, Watched
from osu_bench.flags import message_size, names

if TYPE_CHECKING:
    import argparse

    from osu_bench.cluster.cluster import Cluster
    from osu_bench.failover.cuts import Cut, Outcome

__all__ = ["add"]

WIRES = "tcp", "ucx", "auto"
"""As `Rails` has them; they are not asked for here, because that would start MPI."""
HEADER = ("operation", "cut", "cuts", "wrong", "turn ms", "lost ms", "most lost ms", "bandwidth after")
STILL_SECONDS = 20.0
"""How long a plain MPI is watched after a cut."""


def add(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    about = "cut links in the middle of operations on rails, and show what it costs (needs root)"
    parser = commands.add_parser("failover", help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.add_argument("--hosts", type=int, default=2, help="of the cluster (2)")
    parser.add_argument("--rate", default="1gbit", help="of each link (1gbit)")
    parser.add_argument("--rails", default="eth0,eth1", help="devices (eth0,eth1: the second where the first is dead)")
    parser.add_argument("--wire", choices=WIRES, default="tcp", help="what rails are made of (tcp)")
    parser.add_argument("--operations", type=names, default=["bcast", "allreduce", "send"], metavar="A,B")
    parser.add_argument(
        "--how", type=names, default=["down", "silent", "1"], metavar="A,B", help="down, silent, percent"
    )
    parser.add_argument("--cuts", type=int, default=12, help="for each operation (12)")
    parser.add_argument("-m", "--message-size", type=message_size, default=(1 << 26, 1 << 26), metavar="BYTES")
    parser.add_argument("--timeout", type=float, default=0.5, help="of detection, in seconds (0.5)")
    parser.add_argument("--patience", type=float, help="seconds in which ranks must go on (60, or more for long ones)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="cut under plain MPI too, once for each kind")
    parser.add_argument("--mpich", metavar="PREFIX", help="where an MPICH is, for --plain")
    parser.add_argument("--name", default="failover", help="of the cluster")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from osu_bench.cluster.cluster import Cluster

    args.patience = args.patience or patience(args.message_size[1], parse_rate(args.rate))
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
        for mpi in ["openmpi", *(["mpich"] if args.mpich else [])] if args.plain else []:
            for operation in args.operations:
                for how in kinds:
                    print(
                        f"plain {mpi}, {operation}, {how}: {_plainly(cluster, args, mpi, operation, how)}", flush=True
                    )
    return code


def _on_rails(
    cluster: Cluster, args: argparse.Namespace, operation: str, kinds: list[str | float]
) -> tuple[list[Outcome], bool]:
    hosts = [0, 1] if operation == "send" else list(range(args.hosts))
    with Watched(cluster, operation, args.message_size[1], args.rails, args.timeout, wire=args.wire) as ranks:
        cuts = measure(cluster, ranks, kinds, args.cuts, args.seed, hosts, args.patience)
        code = ranks.finish(args.patience)
    complete = len(cuts) == args.cuts and code == 0 and not any(turn.wrong for turn in ranks.turns)
    if not complete:
        print(
            f"{operation}: exit code {code} after {len(cuts)} cuts", *ranks.errors[-20:], *ranks.said, file=sys.stderr
        )
    found = _outcomes(kinds, cuts, ranks)
    return found, complete


def _outcomes(kinds: list[str | float], cuts: list[Cut], ranks: Watched) -> list[Outcome]:
    return [outcome(how, cuts, ranks.turns) for how in kinds if any(cut.how == how for cut in cuts)]


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


def _plainly(cluster: Cluster, args: argparse.Namespace, mpi: str, operation: str, how: str | float) -> str:
    """Cut once under a plain MPI, and say what becomes of it."""
    mpich = args.mpich if mpi == "mpich" else None
    with Watched(cluster, operation, args.message_size[1], PLAIN, mpi=mpi, mpich=mpich) as ranks:
        if not ranks.wait(3, args.patience):
            return "it did not begin"
        usual = min(turn.seconds for turn in ranks.turns)
        cluster.cut(1, 0, how)
        time.sleep(usual)
        on = ranks.more(2, STILL_SECONDS)
        code = ranks.running.poll()
        cluster.heal()
        if code is not None:
            return f"the job ended with exit code {code}"
        again = ranks.more(2, STILL_SECONDS)
        if on:
            return f"went on, slowest turn {max(turn.seconds for turn in ranks.turns):.2f} s (usually {usual:.2f} s)"
        return (
            f"stood still for {STILL_SECONDS:.0f} s, {'went on' if again else 'stood still'} when the link was healed"
        )
