"""The command `cluster`: makes a cluster on this machine, runs programs on it, and breaks its links."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from mpi_gpucomp.cli.output import table
from osu_bench.arguments import CommandParser
from osu_bench.cluster.cluster import Cluster, take_down
from osu_bench.cluster.network import DOWN, SILENT, in_words
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
    """Make, use, change or remove a cluster."""
    parser = CommandParser("osu_bench cluster", "Hosts on this machine, joined by links of a chosen rate.", EXAMPLE)
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION", parser_class=CommandParser)
    for add_action in (_add_up, _add_run, _add_cut, _add_heal, _add_rate, _add_status, _add_down):
        add_action(actions)
    args = parser.parse_args(argv)
    code: int = args.run(args)
    return code


def _action(actions: Any, name: str, run: Callable[[argparse.Namespace], int], about: str) -> Any:
    parser = actions.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.add_argument("--name", default=DEFAULT_NAME, help=f"of the cluster (default {DEFAULT_NAME})")
    parser.set_defaults(run=run)
    return parser


def _add_up(actions: Any) -> None:
    parser = _action(actions, "up", _up, "make the cluster")
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="number of hosts (default 4)")
    parser.add_argument("--rate", default="1gbit", help="of each link, each way: 1gbit (default), 500mbit, unlimited")
    parser.add_argument(
        "--rails", type=int, default=1, metavar="N", help="links of each host (default 1); MPI uses the first"
    )
    parser.add_argument(
        "--racks", type=int, default=1, metavar="N", help="racks that hosts are dealt out to in turn (default 1)"
    )
    parser.add_argument("--uplink", default="unlimited", help="rate of what leaves a rack, each way: 200mbit")
    parser.add_argument("--replace", action="store_true", help="take down one that is in use")


def _up(args: argparse.Namespace) -> int:
    racks = {"racks": args.racks, "uplink": args.uplink}
    return _print(Cluster.up(args.hosts, args.rate, args.rails, **racks, name=args.name, replace=args.replace))


def _add_run(actions: Any) -> None:
    parser = _action(actions, "run", _run, "run a program, one MPI rank on each host or several")
    parser.add_argument("--mpi", choices=(OPEN_MPI, MPICH), default=OPEN_MPI, help="which MPI (default openmpi)")
    parser.add_argument("--mpich", metavar="PREFIX", help="take the MPICH from there")
    parser.add_argument("-n", type=int, dest="ranks", metavar="N", help="so many ranks, on the first hosts only")
    parser.add_argument("--per-host", type=int, default=1, metavar="N", help="ranks on each host (default 1)")
    parser.add_argument("--in-turn", action="store_true", help="deal the ranks out to the hosts in turn")
    parser.add_argument("program", nargs="+", metavar="PROGRAM", help="the program and its arguments, after --")


def _run(args: argparse.Namespace) -> int:
    cluster = Cluster.current(args.name)
    placed = {"per_host": args.per_host, "in_turn": args.in_turn}
    code = cluster.run(args.program, args.mpi, args.ranks, mpich=args.mpich, **placed).returncode
    return KILLED - code if code < 0 else code


def _add_cut(actions: Any) -> None:
    parser = _action(actions, "cut", _cut, "cut a link: as if its cable were pulled, or unnoticed by both ends")
    parser.add_argument("host", type=int, metavar="HOST")
    parser.add_argument("rail", type=int, nargs="?", default=0, metavar="RAIL")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--silent", dest="how", action="store_const", const=SILENT, default=DOWN, help="packets vanish")
    how.add_argument("--loss", dest="how", type=float, metavar="PERCENT", help="so many of the packets vanish")


def _cut(args: argparse.Namespace) -> int:
    cluster = Cluster.current(args.name)
    cluster.cut(args.host, args.rail, args.how)
    return _print(cluster)


def _add_heal(actions: Any) -> None:
    parser = _action(actions, "heal", _heal, "undo cuts: of a link, of a host, or all")
    parser.add_argument("host", type=int, nargs="?", metavar="HOST")
    parser.add_argument("rail", type=int, nargs="?", metavar="RAIL")


def _heal(args: argparse.Namespace) -> int:
    cluster = Cluster.current(args.name)
    cluster.heal(args.host, args.rail)
    return _print(cluster)


def _add_rate(actions: Any) -> None:
    parser = _action(actions, "rate", _rate, "change the rate: of a link, of a host's links, of all, or of uplinks")
    parser.add_argument("--uplink", action="store_true", help="of what leaves racks instead")
    parser.add_argument("rate", metavar="RATE", help="1gbit, 500mbit; 0 or unlimited")
    parser.add_argument("host", type=int, nargs="?", metavar="HOST")
    parser.add_argument("rail", type=int, nargs="?", metavar="RAIL")


def _rate(args: argparse.Namespace) -> int:
    cluster = Cluster.current(args.name)
    if args.uplink:
        cluster.set_uplink(args.rate)
    else:
        cluster.set_rate(args.rate, args.host, args.rail)
    return _print(cluster)


def _add_status(actions: Any) -> None:
    _action(actions, "status", lambda args: _print(Cluster.current(args.name)), "show the links, and what is cut")


def _print(cluster: Cluster) -> int:
    rows = [
        (cluster.plan.host_name(link.host), str(link.rail), link.address, in_words(link.rate), link.state)
        for link in cluster.status()
    ]
    print(table(HEADER, rows))
    for (rack, rail), rate in cluster.uplinks().items():
        hosts = [cluster.plan.host_name(host) for host in range(cluster.plan.hosts) if cluster.plan.rack(host) == rack]
        print(f"rack {rack} ({' '.join(hosts)}), rail {rail}: uplink {in_words(rate)}")
    return 0


def _add_down(actions: Any) -> None:
    _action(actions, "down", _down, "end what runs on the cluster and remove it")


def _down(args: argparse.Namespace) -> int:
    processes, namespaces = take_down(args.name)
    print(f"removed; namespaces: {namespaces}, processes: {processes}" if namespaces else "nothing is up")
    return 0
