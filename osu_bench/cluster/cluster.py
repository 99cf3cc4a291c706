"""The cluster as an object: made, used and taken down."""

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
"""Tells ranks what their network is like, as JSON with hosts, rate (bits a second or null) and rails."""


class Cluster:
    """Hosts on this machine, joined by links; as a context manager it takes itself down, whatever happens."""

    def __init__(self, plan: Plan, identity: str) -> None:
        """Stand for a cluster that is up; `up` and `current` return one."""
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
        """Make a cluster that is in use as long as this process; what an earlier one has left is removed first.

        With several racks all that leaves one goes through its `uplink`, of that rate each way.
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
        """Return the cluster that is up, whoever made it."""
        found = cls(*state.recall(name))
        system.check()
        return found

    def down(self) -> None:
        """End what runs on the cluster and remove it; once more, or once others have replaced it, does nothing."""
        with state.locked():
            if state.identity(self.plan.name) == self._identity:
                _remove(self.plan.name)

    def __enter__(self) -> Cluster:
        """Return itself; SIGTERM now raises SystemExit, so that the cluster is taken down then too."""
        self._on_exit.enter_context(terminable())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take it down."""
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
        """Run a program on all hosts, or on the first ones, and wait for its end.

        There are `per_host` ranks on each host, which fill host after host unless they are dealt out `in_turn`.

        It sees this process's variables and those of `environment`; `mpich` is the prefix of an MPICH that is not
        beside Python, and `options` are further ones of the launcher. After `timeout` seconds it is ended.
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
        """Start a program as `run` does, and return while it goes on; the cluster is in use as long as this process."""
        launcher = find(MPICH if mpich else mpi, mpich)
        ranks = ranks or self.plan.hosts * per_host
        command = launch.command(self.plan, launcher, ranks, program, options, per_host, in_turn)
        state.hold(self.plan.name)
        given = {**os.environ, NETWORK_VARIABLE: self._in_json(), **(environment or {})}
        return Running(self.plan, command, launch.environment(self.plan, launcher, given, per_host), capture)

    def inside(self, host: int) -> list[str]:
        """Return the words that, put before any command, run it on a host."""
        self.plan.check_link(host, 0)
        return system.inside(self.plan.namespace(host))

    def cut(self, host: int, rail: int = 0, how: str | float = links.DOWN) -> None:
        """Cut a link: "down" as if the cable were pulled, "silent", or a percentage of packets that are lost."""
        self.plan.check_link(host, rail)
        links.cut(self.plan, host, rail, how)

    def heal(self, host: int | None = None, rail: int | None = None) -> None:
        """Undo the cuts of a link, of a host's links, or of all."""
        for one in self._chosen(host, rail):
            links.heal(self.plan, *one)

    def set_rate(self, rate: Rate, host: int | None = None, rail: int | None = None) -> None:
        """Change the rate of a link, of a host's links, or of all."""
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
        """Return all links as they are now."""
        return links.read(self.plan)

    def uplinks(self) -> dict[tuple[int, int], float | None]:
        """Return the rates of the uplinks as they are now, by rack and rail."""
        return links.read_uplinks(self.plan)

    def _chosen(self, host: int | None, rail: int | None) -> list[tuple[int, int]]:
        self.plan.check_link(host or 0, rail or 0)
        return [one for one in self.plan.links() if host in (None, one[0]) and rail in (None, one[1])]

    def _in_json(self) -> str:
        rates = [link.rate for link in self.status() if link.rate is not None]
        slowest = min(rates, default=None)
        return json.dumps({"hosts": self.plan.hosts, "rate": slowest, "rails": self.plan.rails})

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Keep others from replacing the cluster meanwhile."""
        if os.getpid() in state.holders(self.plan.name):
            yield
            return
        state.hold(self.plan.name)
        try:
            yield
        finally:
            state.release(self.plan.name)


def take_down(name: str = DEFAULT_NAME) -> tuple[int, int]:
    """End and remove all that there is of a cluster, and say how many processes and namespaces that were."""
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
            expected="one that nobody uses",
            got=f"one in use by process {' and '.join(map(str, using))}",
            remedy="Wait, choose another --name, or take it over with --replace.",
        )
    processes, namespaces = _remove(name)
    if namespaces:
        left = f"namespaces: {namespaces}, processes: {processes}"
        print(f"cluster {name}: removed what was left of it; {left}", file=sys.stderr)
