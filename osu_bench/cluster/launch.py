"""Start MPI programs on the hosts of a cluster, without sshd.

The launcher runs in the switch's namespace, with its own host name and /etc/hosts. In place of ssh it calls an agent
that enters the host's namespace.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from uuid import uuid4

from mpi_gpucomp.config import WORKERS
from mpi_gpucomp.device.host import usable_cores
from mpi_gpucomp.errors import SpecError
from osu_bench.cluster.plan import Plan, path_of
from osu_bench.cluster.processes import GRACE, Process, end, marked, process
from osu_bench.cluster.state import folder
from osu_bench.cluster.system import inside
from osu_bench.launcher import MPICH, OPEN_MPI, Launcher

__all__ = ["Running", "command", "environment", "write_files"]

AGENT, HOSTS = "agent", "hosts"

# Launchers pass ssh options, a host, and a shell command, which may set variables. UCX finds devices in /sys, which
# shows those of the namespace in which it was mounted.
AGENT_TEXT = """\
#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1; shift
exec nsenter --net={namespaces}$host unshare --uts --mount bash -c "hostname $host; mount -t sysfs sysfs /sys; $*"
"""

START = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


def write_files(plan: Plan) -> None:
    """Write the agent and the table of hosts."""
    agent = folder(plan.name) / AGENT
    agent.write_text(AGENT_TEXT.format(namespaces=path_of(f"{plan.name}-")))
    agent.chmod(0o755)
    lines = ["127.0.0.1 localhost", f"{plan.management_address()} switch"]
    lines += [f"{plan.management_address(host)} {plan.host_name(host)}" for host in range(plan.hosts)]
    (folder(plan.name) / HOSTS).write_text("\n".join(lines) + "\n")


def command(
    plan: Plan,
    launcher: Launcher,
    ranks: int,
    program: Sequence[str],
    options: Sequence[str] = (),
    per_host: int = 1,
    in_turn: bool = False,
) -> list[str]:
    """Return the command that runs a program on the first hosts, with `per_host` ranks on each.

    Ranks fill host after host, or with `in_turn` are assigned to hosts round-robin.
    """
    most = plan.hosts * per_host
    if not 1 <= ranks <= most:
        remedy = "Each host runs one rank: make a larger cluster with `osu_bench cluster up --hosts N`."
        if per_host > 1:
            remedy = f"Each host runs {per_host} ranks: use fewer, or make a larger cluster."
        raise SpecError("ranks on the cluster", expected=f"1 to {most}", got=str(ranks), remedy=remedy)
    placed = _OPTIONS[launcher.mpi](plan, -(-ranks // per_host), per_host, in_turn)
    own = launcher.command(ranks, program, [*placed, *options])
    start = ["unshare", "--uts", "--mount", "bash", "-c", START, "bash", "switch", str(folder(plan.name) / HOSTS)]
    return [*inside(plan.switch), *start, *own]


def _open_mpi(plan: Plan, hosts: int, per_host: int, in_turn: bool) -> list[str]:
    named = ",".join(f"{plan.host_name(host)}:{per_host}" for host in range(hosts))
    return ["--host", named, "--map-by", "node" if in_turn else f"ppr:{per_host}:node", "--bind-to", "none"]


def _mpich(plan: Plan, hosts: int, per_host: int, in_turn: bool) -> list[str]:
    named = ",".join(plan.host_name(host) for host in range(hosts))
    agent = str(folder(plan.name) / AGENT)
    management = ["-iface", plan.management, "-localhost", plan.management_address()]
    return [
        "-launcher",
        "ssh",
        "-launcher-exec",
        agent,
        *management,
        "-hosts",
        named,
        "-ppn",
        "1" if in_turn else str(per_host),
    ]


_OPTIONS = {OPEN_MPI: _open_mpi, MPICH: _mpich}


def environment(plan: Plan, launcher: Launcher, given: Mapping[str, str], per_host: int = 1) -> dict[str, str]:
    """Return the caller's variables plus those that make MPI use the links; the caller's take precedence."""
    share = max(1, usable_cores() // plan.hosts // per_host)
    ours = {"GLOO_SOCKET_IFNAME": plan.interface(0), WORKERS.variable: str(share)}
    return {**_DEFAULTS[launcher.mpi](plan), **ours, **given, **launcher.environment}


def _open_mpi_defaults(plan: Plan) -> dict[str, str]:
    return {
        "PRTE_MCA_plm_ssh_agent": str(folder(plan.name) / AGENT),
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
        "PRTE_MCA_prte_if_include": plan.management_network,
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "tcp,self,sm",
        "OMPI_MCA_btl_tcp_if_include": plan.network(0),
        # Ranks share the cores, so a waiting rank must yield.
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }


def _mpich_defaults(plan: Plan) -> dict[str, str]:
    return {
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": plan.interface(0),
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    }


_DEFAULTS = {OPEN_MPI: _open_mpi_defaults, MPICH: _mpich_defaults}


MARK = "OSU_BENCH_RUN"


class Running:
    """A program that runs on a cluster while its caller does other work, such as cutting links."""

    def __init__(self, plan: Plan, command: Sequence[str], environment: Mapping[str, str], capture: bool) -> None:
        """Start it in a new session, because the terminal's Ctrl-C would reach the launcher twice."""
        self._plan, self._mark = plan, f"{MARK}={uuid4().hex}"
        pipe = subprocess.PIPE if capture else None
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            env={**environment, MARK: self._mark.partition("=")[2]},
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for it and return the exit code."""
        return self.process.wait(timeout)

    def complete(self, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Wait for it and return its output; end it if waiting is interrupted or times out."""
        try:
            output, errors = self.process.communicate(timeout=timeout)
        except BaseException:
            self.end()
            raise
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, output, errors)

    def end(self, grace: float = GRACE) -> None:
        """End the launcher, which ends the ranks, then any remaining processes."""
        end(self._launcher, grace)
        end(self.processes, grace)
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def _launcher(self) -> list[Process]:
        found = process(self.process.pid) if self.process.poll() is None else None
        return [found] if found else []

    def processes(self) -> list[Process]:
        """Return its live processes: launcher, agents and ranks."""
        return marked(self._plan.namespaces, self._mark)

    def __enter__(self) -> Running:
        """Return this object."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the program."""
        self.end()
