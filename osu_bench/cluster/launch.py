"""How an MPI's launcher starts ranks on the hosts of a cluster, without sshd.

The launcher runs beside the switch, with a host name and an /etc/hosts of its own. It reaches hosts by
what it takes for ssh: an agent that enters the host's namespace instead.
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

# Launchers pass options of ssh, a host, and words for a shell, of which the first may set variables. UCX looks for
# devices in /sys, which shows those of the namespace in which it was mounted.
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
    """Return the command that runs a program on the first hosts, so many ranks on each.

    They fill host after host, or are dealt out to the hosts in turn.
    """
    most = plan.hosts * per_host
    if not 1 <= ranks <= most:
        remedy = "Each host runs one rank; make a larger cluster with `osu_bench cluster up --hosts N`."
        if per_host > 1:
            remedy = f"Each host runs {per_host} ranks; ask for fewer, or make a larger cluster."
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
    """Add to the caller's variables those that make MPI use the links; what the caller has set stays."""
    share = max(1, usable_cores() // plan.hosts // per_host)  # of the cores, for each rank
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
        # Ranks share the cores, so one that waits gives way.
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


# A program that runs on a cluster, and its end.

MARK = "OSU_BENCH_RUN"


class Running:
    """A program that goes on while its caller does other things, such as cutting links."""

    def __init__(self, plan: Plan, command: Sequence[str], environment: Mapping[str, str], capture: bool) -> None:
        """Start it, apart from the terminal, whose Ctrl-C would reach the launcher twice."""
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
        """Wait for its end, and return the exit code."""
        return self.process.wait(timeout)

    def complete(self, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Wait for its end, and return what it has said; whatever keeps us from waiting ends it."""
        try:
            output, errors = self.process.communicate(timeout=timeout)
        except BaseException:
            self.end()
            raise
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, output, errors)

    def end(self, grace: float = GRACE) -> None:
        """End the launcher, which ends the ranks, and whatever is left of them."""
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
        """Return those of its processes that are alive: launcher, agents and ranks."""
        return marked(self._plan.namespaces, self._mark)

    def __enter__(self) -> Running:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.end()
