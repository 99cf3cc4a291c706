"""The cluster as an object: created, used and removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from mpi_gpucomp.errors import SpecError
from osu_bench.cluster import launch, network, state, system
from osu_bench.cluster import network as links
from osu_bench.cluster.launch import Running
from osu_bench.cluster.network import Rate, parse_rate
from osu_bench.cluster.plan import DEFAULT_NAME, Plan
from osu_bench.cluster.processes import terminable
from osu_bench.cluster.system import ClusterError
from osu_bench.launcher import MPICH, OPEN_MPI, find

__all__ = ["NETWORK_VARIABLE", "Cluster"]

NETWORK_VARIABLE = "OSU_BENCH_NETWORK"
"""Describes the network to ranks, as JSON: hosts, rate (bits per second or null) and rails."""


class Cluster:
    """Hosts on this machine, joined by links; a context manager removes them on exit."""

    def __init__(self, plan: Plan, identity: str) -> None:
        """Represent a cluster that is up; use `up` or `current` to get one."""
        self.plan, self._identity = plan, identity
        self._on_exit = ExitStack()

    @classmethod
    def up(
        cls,
        hosts: int,
        rate: Rate = None,
        rails: int = 1,
        *,
        racks: int = 1,
        uplink: Rate = None,
        name: str = DEFAULT_NAME,
        replace: bool = False,
    ) -> Cluster:
        """Create a cluster, held by this process; remains of an earlier one are removed first.

        With several racks, traffic between them passes through their uplinks of rate `uplink`.
        """
        plan, bits, uplink_bits = Plan(name, hosts, rails, racks), parse_rate(rate), parse_rate(uplink)
        system.check()
        with terminable(), state.locked():
            _clear(name, replace)
            try:
                identity = state.remember(plan)
                launch.write_files(plan)
                network.build(plan, bits, uplink_bits)
                state.hold(name)
            except BaseException:
                _remove(name)
                raise
        return cls(plan, identity)

    @classmethod
    def current(cls, name: str = DEFAULT_NAME) -> Cluster:
        """Return the cluster of this name, which this or another process has created."""
        found = cls(*state.recall(name))
        system.check()
        return found

    def down(self) -> None:
        """End the cluster's processes and remove it; do nothing if it was removed or replaced before."""
        with state.locked():
            if state.identity(self.plan.name) == self._identity:
                _remove(self.plan.name)

    def __enter__(self) -> Cluster:
        """Return this object; SIGTERM raises SystemExit from now on, so that the cluster is removed then too."""
        self._on_exit.enter_context(terminable())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the cluster."""
        with self._on_exit:
            self.down()

    def run(
        self,
        program: Sequence[str],
        mpi: str = OPEN_MPI,
        ranks: int | None = None,
        timeout: float | None = None,
        environment: Mapping[str, str] | None = None,
        capture: bool = False,
        mpich: Path | str | None = None,
        options: Sequence[str] = (),
        per_host: int = 1,
        in_turn: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on all hosts, or with `ranks` on the first ones, and wait for it.

        `per_host` ranks run on each host; they fill host after host, or with `in_turn` are assigned round-robin.
        The program gets this process's environment and `environment`; `mpich` is the prefix of an MPICH installation,
        and `options` are passed to the launcher. The program is ended after `timeout` seconds.
        """
        with self._held(), terminable():
            running = self.start(program, mpi, ranks, environment, capture, mpich, options, per_host, in_turn)
            return running.complete(timeout)

    def start(
        self,
        program: Sequence[str],
        mpi: str = OPEN_MPI,
        ranks: int | None = None,
        environment: Mapping[str, str] | None = None,
        capture: bool = False,
        mpich: Path | str | None = None,
        options: Sequence[str] = (),
        per_host: int = 1,
        in_turn: bool = False,
    ) -> Running:
        """Start a program as `run` does, and return at once; this process then holds the cluster."""
        launcher = find(MPICH if mpich else mpi, mpich)
        ranks = ranks or self.plan.hosts * per_host
        command = launch.command(self.plan, launcher, ranks, program, options, per_host, in_turn)
        state.hold(self.plan.name)
        given = {**os.environ, NETWORK_VARIABLE: self._network_json(), **(environment or {})}
        return Running(self.plan, command, launch.environment(self.plan, launcher, given, per_host), capture)

    def inside(self, host: int) -> list[str]:
        """Return the command prefix that runs a program on a host."""
        self.plan.check_link(host, 0)
        return system.inside(self.plan.namespace(host))

    def cut(self, host: int, rail: int = 0, how: str | float = links.DOWN) -> None:
        """Cut a link: "down" removes the carrier, "silent" drops all packets, a number that percentage of them."""
        self.plan.check_link(host, rail)
        links.cut(self.plan, host, rail, how)

    def heal(self, host: int | None = None, rail: int | None = None) -> None:
        """Undo the cuts of one link, of a host's links, or of all links."""
        for one in self._chosen(host, rail):
            links.heal(self.plan, *one)

    def set_rate(self, rate: Rate, host: int | None = None, rail: int | None = None) -> None:
        """Change the rate of one link, of a host's links, or of all links."""
        bits = parse_rate(rate)
        for one in self._chosen(host, rail):
            links.shape(self.plan, *one, bits)

    def set_uplink(self, rate: Rate) -> None:
        """Change the rate of the uplinks of all racks."""
        bits = parse_rate(rate)
        if self.plan.racks == 1:
            remedy = "Make one with racks: osu_bench cluster up --racks 2."
            raise SpecError(f"cluster {self.plan.name}", expected="racks with uplinks", got="one switch", remedy=remedy)
        for one in self.plan.uplinks():
            links.shape_uplink(self.plan, *one, bits)

    def status(self) -> list[links.Link]:
        """Return the current state of all links."""
        return links.read(self.plan)

    def uplinks(self) -> dict[tuple[int, int], float | None]:
        """Return the current rates of the uplinks, by rack and rail."""
        return links.read_uplinks(self.plan)

    def _chosen(self, host: int | None, rail: int | None) -> list[tuple[int, int]]:
        self.plan.check_link(host or 0, rail or 0)
        return [one for one in self.plan.links() if host in (None, one[0]) and rail in (None, one[1])]

    def _network_json(self) -> str:
        rates = [link.rate for link in self.status() if link.rate is not None]
        slowest = min(rates, default=None)
        return json.dumps({"hosts": self.plan.hosts, "rate": slowest, "rails": self.plan.rails})

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Keep other processes from replacing the cluster within the block."""
        if os.getpid() in state.holders(self.plan.name):
            yield
            return
        state.hold(self.plan.name)
        try:
            yield
        finally:
            state.release(self.plan.name)


def take_down(name: str = DEFAULT_NAME) -> tuple[int, int]:
    """End a cluster's processes and remove it; return the numbers of processes and namespaces."""
    system.check()
    with state.locked():
        return _remove(name)


def _remove(name: str) -> tuple[int, int]:
    found = network.remove(name)
    state.forget(name)
    return found


def _clear(name: str, replace: bool) -> None:
    using = state.holders(name)
    if using and not replace:
        raise ClusterError(
            f"cluster {name}",
            expected="a cluster that no process uses",
            got=f"one in use by process {' and '.join(map(str, using))}",
            remedy="Wait, choose another --name, or replace it with --replace.",
        )
    processes, namespaces = _remove(name)
    if namespaces:
        left = f"namespaces: {namespaces}, processes: {processes}"
        print(f"cluster {name}: removed the remains of an earlier one; {left}", file=sys.stderr)
