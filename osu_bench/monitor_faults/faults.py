"""The faults: how each is made and taken back, what should be said of it, and how long that may take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from osu_bench.cluster.rate import shaping
from osu_bench.cluster.system import call
from osu_bench.monitor_faults.ranks import LATE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from osu_bench.cluster import Cluster

__all__ = ["FAULTS", "HOSTS", "NEED_NETWORK", "RATE", "Fault", "Job"]

HOSTS, RATE, SLOW_RATE = 4, 1e9, 2e8
STALL_SECONDS = 0.005
HOGS = 8


class Job(NamedTuple):
    """What runs, and where."""

    cluster: Cluster | None
    directory: Path

    @property
    def network(self) -> Cluster:
        """Return the cluster, where there is one."""
        assert self.cluster is not None, "there is no network here"
        return self.cluster

    def pid(self, rank: int) -> int:
        """Return a rank's process."""
        return int((self.directory / f"{rank}.pid").read_text())


@contextmanager
def slow_link(job: Job) -> Iterator[None]:
    """Slow down what host 1 sends, and nothing else: in a chain that goes to rank 2."""
    plan = job.network.plan
    where = "dev", plan.interface(0), "root"
    call("tc", "qdisc", "replace", *where, *shaping(SLOW_RATE), within=plan.namespace(1))
    try:
        yield
    finally:
        call("tc", "qdisc", "replace", *where, *shaping(RATE), within=plan.namespace(1))


@contextmanager
def slow_network(job: Job) -> Iterator[None]:
    """Slow down both directions of host 2's link."""
    job.network.set_rate(SLOW_RATE, 2)
    try:
        yield
    finally:
        job.network.set_rate(RATE, 2)


@contextmanager
def busy_host(job: Job) -> Iterator[None]:
    """Let rank 2 share one processor with other programs, and the other ranks have the rest.

    Each is a session of its own: Linux shares a processor among sessions first. A rank that only passes on what comes
    needs so little that it hardly notices; one that decodes does.
    """
    cores = sorted(os.sched_getaffinity(0))
    hog = [sys.executable, "-c", "while True: pass"]
    with ExitStack() as stack:
        for rank in range(HOSTS):
            _pin(job.pid(rank), set(cores[-1:]) if rank == 2 else set(cores[:-1]))
            stack.callback(_pin, job.pid(rank), set(cores))
        for _ in range(HOGS):
            process = subprocess.Popen(hog, start_new_session=True)
            os.sched_setaffinity(process.pid, set(cores[-1:]))
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def _pin(pid: int, cores: set[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


@contextmanager
def stopped_often(job: Job) -> Iterator[None]:
    """Stop rank 2 most of the time, as a host does that is slow in everything."""
    program = (
        "import os, signal, sys, time\n"
        "while True:\n"
        "    os.kill(int(sys.argv[1]), signal.SIGSTOP); time.sleep(0.03)\n"
        "    os.kill(int(sys.argv[1]), signal.SIGCONT); time.sleep(0.01)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(job.pid(2))])
    try:
        yield
    finally:
        process.kill()
        process.wait()
        os.kill(job.pid(2), signal.SIGCONT)


@contextmanager
def stall(job: Job) -> Iterator[None]:
    """Stop rank 2 for 5 ms, once."""
    os.kill(job.pid(2), signal.SIGSTOP)
    time.sleep(STALL_SECONDS)
    os.kill(job.pid(2), signal.SIGCONT)
    yield


@contextmanager
def dead_rank(job: Job) -> Iterator[None]:
    """Stop rank 2 for good, or so it seems to the others."""
    os.kill(job.pid(2), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(job.pid(2), signal.SIGCONT)


@contextmanager
def cut(job: Job) -> Iterator[None]:
    """Let all packets of host 2 vanish."""
    job.network.cut(2, how="silent")
    try:
        yield
    finally:
        job.network.heal(2)


@contextmanager
def late_rank(job: Job) -> Iterator[None]:
    """Let the last rank come 0.2 s late to every call."""
    (job.directory / LATE).touch()
    try:
        yield
    finally:
        (job.directory / LATE).unlink()


class Fault(NamedTuple):
    """What is made, what should be said of it, and how long that may take."""

    make: Callable[[Job], AbstractContextManager[None]]
    expected: tuple[str, ...]
    seconds: float


FAULTS = {
    "slow link": Fault(slow_link, ("slow link: from rank 1 ", "to rank 2 "), 3.0),
    # What leaves a host at the pace at which it comes in is never waited for: the link to it alone may be seen.
    "slow network of a host": Fault(slow_network, ("slow ", " rank 2 (h2)"), 4.0),
    "busy host": Fault(busy_host, ("slow rank: rank 2 ",), 8.0),
    "host that is often stopped": Fault(stopped_often, ("slow rank: rank 2 ",), 4.0),
    "stall of 5 ms": Fault(stall, ("stall: rank 2 ",), 1.0),
    "dead rank": Fault(dead_rank, ("hang: rank 2 ", "does not answer"), 8.0),
    "cut of a host": Fault(cut, ("hang: rank 2 ", "does not answer"), 8.0),
    "late rank": Fault(late_rank, ("imbalance: rank 3 ",), 6.0),
}

NEED_NETWORK = ("slow link", "slow network of a host", "busy host", "cut of a host")
