"""The command `cluster`: create a cluster on this machine, run programs on it, and cut its links."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mpi_gpucomp.cli.command import table
from osu_bench.arguments import CommandParser
from osu_bench.cluster import rootless, state
from osu_bench.cluster.cluster import Cluster, take_down
from osu_bench.cluster.network import DOWN, SILENT, rate_label
from osu_bench.cluster.plan import DEFAULT_NAME
from osu_bench.launcher import MPICH, OPEN_MPI

__all__ = ["main"]

HEADER = ("host", "rail", "address", "rate", "link")
KILLED = 128
EXAMPLE = """\
osu_bench cluster up --hosts 4 --rate 1gbit
osu_bench cluster run -- osu_bench bcast -m 64M:64M --compare mpi,none,split
osu_bench cluster down"""


def main(argv: Sequence[str] | None = None) -> int:
    """Create, use, change or remove a cluster."""
    parser = CommandParser("osu_bench cluster", "Hosts on this machine, joined by links of a chosen rate.", EXAMPLE)
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION", parser_class=CommandParser)
    for add_action in (_add_up, _add_run, _add_cut, _add_heal, _add_rate, _add_status, _add_down):
        add_action(actions)
    words = list(sys.argv[2:] if argv is None else argv)
    args = parser.parse_args(words)
    if not rootless.join("cluster", *words, create=args.run is _up):
        if args.run is _down:
            return _print_removed(0, 0)
        raise state.not_up(args.name)
    code: int = args.run(args)
    return code


def _action(actions: Any, name: str, run: Callable[[argparse.Namespace], int], about: str, example: str = "") -> Any:
    """Add an action; `example` holds the arguments of a command line that makes sense."""
    command = f"osu_bench cluster {name} {example}".rstrip()
    parser = actions.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", example=command)
    parser.add_argument("--name", default=DEFAULT_NAME, help=f"of the cluster (default {DEFAULT_NAME})")
    parser.set_defaults(run=run)
    return parser


def _add_up(actions: Any) -> None:
    parser = _action(actions, "up", _up, "create the cluster", "--hosts 8 --rate 400mbit --racks 3 --uplink 200mbit")
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="number of hosts (default 4)")
    parser.add_argument("--rate", default="1gbit", help="link rate per direction: 1gbit (default), 500mbit, unlimited")
    parser.add_argument(
        "--rails", type=int, default=1, metavar="N", help="links of each host (default 1); MPI uses the first"
    )
    parser.add_argument(
        "--racks", type=int, default=1, metavar="N", help="racks, to which hosts are assigned round-robin (default 1)"
    )
    parser.add_argument("--uplink", default="unlimited", help="rate between racks, in each direction: 200mbit")
    parser.add_argument("--replace", action="store_true", help="remove a cluster of this name even if it is in use")


def _up(args: argparse.Namespace) -> int:
    racks = {"racks": args.racks, "uplink": args.uplink}
    return _print(Cluster.up(args.hosts, args.rate, args.rails, **racks, name=args.name, replace=args.replace))


def _add_run(actions: Any) -> None:
    parser = _action(
        actions, "run", _run, "run a program, one MPI rank on each host or several", "-- python program.py"
    )
    parser.add_argument("--mpi", choices=(OPEN_MPI, MPICH), default=OPEN_MPI, help="MPI library (default openmpi)")
    parser.add_argument("--mpich", metavar="PREFIX", help="prefix of the MPICH installation")
    parser.add_argument("-n", type=int, dest="ranks", metavar="N", help="number of ranks, on the first hosts")
    parser.add_argument("--per-host", type=int, default=1, metavar="N", help="ranks on each host (default 1)")
    parser.add_argument("--in-turn", action="store_true", help="assign ranks to hosts round-robin")
    parser.add_argument("program", nargs="+", metavar="PROGRAM", help="the program and its arguments, after --")


def _run(args: argparse.Namespace) -> int:
    cluster = Cluster.current(args.name)
    placed = {"per_host": args.per_host, "in_turn": args.in_turn}
    code = cluster.run(args.program, args.mpi, args.ranks, mpich=args.mpich, **placed).returncode
    return KILLED - code if code < 0 else code


def _add_cut(actions: Any) -> None:
    parser = _action(
        actions, "cut", _cut, "cut a link: remove its carrier, or drop packets (needs nftables)", "2 --silent"
    )
    parser.add_argument("host", type=int, metavar="HOST", help="number of the host")
    parser.add_argument("rail", type=int, nargs="?", default=0, metavar="RAIL", help="one of its links (default 0)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--silent", dest="how", action="store_const", const=SILENT, default=DOWN, help="drop all packets")
    how.add_argument("--loss", dest="how", type=float, metavar="PERCENT", help="drop this percentage of packets")


def _cut(args: argparse.Namespace) -> int:
    cluster = Cluster.current(args.name)
    cluster.cut(args.host, args.rail, args.how)
    return _print(cluster)


def _add_heal(actions: Any) -> None:
    parser = _action(actions, "heal", _heal, "undo cuts: of a link, of a host, or of all hosts", "2")
    parser.add_argument("host", type=int, nargs="?", metavar="HOST", help="only this host")
    parser.add_argument("rail", type=int, nargs="?", metavar="RAIL", help="only this link of the host")


def _heal(args: argparse.Namespace) -> int:
    cluster = Cluster.current(args.name)
    cluster.heal(args.host, args.rail)
    return _print(cluster)


def _add_rate(actions: Any) -> None:
    about = "change the rate of a link, of a host, of all links, or of the uplinks"
    parser = _action(actions, "rate", _rate, about, "500mbit 2")
    parser.add_argument("--uplink", action="store_true", help="of the uplinks")
    parser.add_argument("rate", metavar="RATE", help="1gbit, 500mbit; 0 or unlimited")
    parser.add_argument("host", type=int, nargs="?", metavar="HOST", help="only this host")
    parser.add_argument("rail", type=int, nargs="?", metavar="RAIL", help="only this link of the host")


def _rate(args: argparse.Namespace) -> int:
    cluster = Cluster.current(args.name)
    if args.uplink:
        cluster.set_uplink(args.rate)
    else:
        cluster.set_rate(args.rate, args.host, args.rail)
    return _print(cluster)


def _add_status(actions: Any) -> None:
    _action(actions, "status", lambda args: _print(Cluster.current(args.name)), "print the state of all links")


def _print(cluster: Cluster) -> int:
    rows = [
        (cluster.plan.host_name(link.host), str(link.rail), link.address, rate_label(link.rate), link.state)
        for link in cluster.status()
    ]
    print(table(HEADER, rows))
    for (rack, rail), rate in cluster.uplinks().items():
        hosts = [cluster.plan.host_name(host) for host in range(cluster.plan.hosts) if cluster.plan.rack(host) == rack]
        print(f"rack {rack} ({' '.join(hosts)}), rail {rail}: uplink {rate_label(rate)}")
    return 0


def _add_down(actions: Any) -> None:
    _action(actions, "down", _down, "end the cluster's programs and remove it")


def _down(args: argparse.Namespace) -> int:
    removed = take_down(args.name)
    rootless.end_keeper()
    return _print_removed(*removed)


def _print_removed(processes: int, namespaces: int) -> int:
    print(f"removed; namespaces: {namespaces}, processes: {processes}" if namespaces else "nothing is up")
    return 0
