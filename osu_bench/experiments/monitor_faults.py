"""Inject faults on a cluster and measure how long the monitor takes to name each.

    osu_bench monitor_faults                  # every fault, a few minutes
    osu_bench monitor_faults --clean 180      # no fault, for this many seconds
    osu_bench monitor_faults --here           # without a cluster: faults that need no network

Four hosts broadcast in a loop. Each fault is injected, the monitor's alarms are read from its log, and the fault is
removed. A row shows the alarm and its delay; alarms without a fault are printed too.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from osu_bench.arguments import CommandParser
from osu_bench.cluster import Cluster, rootless
from osu_bench.cluster.network import shaping
from osu_bench.cluster.system import call
from osu_bench.launcher import find

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

__all__ = ["FAULTS", "HOSTS", "LATE", "NEED_NETWORK", "RATE", "Fault", "Job", "Log", "broadcast", "main"]


SAME_SECONDS = 3.0
"""Seconds within which equal alarms of several ranks count once."""


class Log:
    """The alarms of all ranks, with the times at which they were first seen."""

    def __init__(self, directory: Path) -> None:
        """Read the files of a directory."""
        self._directory, self._read = directory, dict[Path, int]()
        self.lines: list[tuple[float, str]] = []

    def read(self) -> None:
        """Read new alarms; equal ones of several ranks count once."""
        for path in sorted(self._directory.glob("*.alarms")):
            text = path.read_text()
            for line in text[self._read.get(path, 0) :].splitlines():
                alarm = line.partition(": ")[2]
                now = time.monotonic()
                if not any(alarm == known and now - at < SAME_SECONDS for at, known in self.lines[-20:]):
                    self.lines.append((now, alarm))
            self._read[path] = len(text)

    def wait(self, seconds: float, words: tuple[str, ...] | None, since: int) -> tuple[float, str] | None:
        """Wait for an alarm that contains these words and return it."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.read()
            for at, alarm in self.lines[since:]:
                if words and not alarm.startswith("over") and all(word in alarm for word in words):
                    return at, alarm
            time.sleep(0.02)
        return None


LATE = "late"
"""While this file exists, the last rank is late."""
DEBUG = "OSU_BENCH_DEBUG"
"""Prefix of a debug log file for each rank."""


def broadcast(directory: Path, seconds: float, codec: str) -> None:
    """Broadcast 16 MB in a loop; the last rank is late while the file LATE exists."""
    from mpi4py import MPI

    from mpi_gpucomp import Communicator

    world = MPI.COMM_WORLD
    if os.environ.get(DEBUG):
        logging.basicConfig(filename=f"{os.environ[DEBUG]}.{world.rank}", level=logging.DEBUG)
    values = np.random.default_rng(0).normal(0, 0.02, 1 << 22).astype(np.float32)
    (directory / f"{world.rank}.pid").write_text(str(os.getpid()))
    with Communicator(world, codec) as comm:
        end, calls = time.monotonic() + seconds, 0
        go_on = np.ones(1, bool)
        while go_on[0]:
            if world.rank == world.size - 1 and (directory / LATE).exists():
                time.sleep(0.2)
            comm.Bcast(values)
            calls += 1
            go_on[0] = time.monotonic() < end
            world.Bcast(go_on)
    if world.rank == 0:
        print(f"# {calls} broadcasts", flush=True)


HOSTS, RATE, SLOW_RATE = 4, 1e9, 2e8
STALL_SECONDS = 0.005
HOGS = 8


class Job(NamedTuple):
    """The cluster, and the directory that ranks share."""

    cluster: Cluster | None
    directory: Path

    @property
    def network(self) -> Cluster:
        """Return the cluster."""
        assert self.cluster is not None, "no cluster"
        return self.cluster

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        return int((self.directory / f"{rank}.pid").read_text())


@contextmanager
def slow_link(job: Job) -> Iterator[None]:
    """Slow down only what host 1 sends, which in a chain goes to rank 2."""
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
    """Let rank 2 share one core with busy programs, and the other ranks use the rest.

    Each program has its own session, because Linux divides a core among sessions first. A rank that only relays
    messages is hardly affected; one that decodes is.
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
    """Stop rank 2 for most of the time, like a host that is slow in everything."""
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
    """Stop rank 2 until the end of the block."""
    os.kill(job.pid(2), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(job.pid(2), signal.SIGCONT)


@contextmanager
def cut(job: Job) -> Iterator[None]:
    """Drop all packets of host 2."""
    job.network.cut(2, how="silent")
    try:
        yield
    finally:
        job.network.heal(2)


@contextmanager
def late_rank(job: Job) -> Iterator[None]:
    """Delay the last rank by 0.2 s in every call."""
    (job.directory / LATE).touch()
    try:
        yield
    finally:
        (job.directory / LATE).unlink()


class Fault(NamedTuple):
    """A fault, the words of the expected alarm, and the seconds that it may take."""

    inject: Callable[[Job], AbstractContextManager[None]]
    expected: tuple[str, ...]
    seconds: float


FAULTS = {
    "slow link": Fault(slow_link, ("slow link: from rank 1 ", "to rank 2 "), 8.0),
    # Only the incoming link may be visible: data that leaves as fast as it arrives is never waited for.
    "slow network of a host": Fault(slow_network, ("slow ", " rank 2 (h2)"), 8.0),
    "busy host": Fault(busy_host, ("slow rank: rank 2 ",), 8.0),
    "host that is often stopped": Fault(stopped_often, ("slow rank: rank 2 ",), 4.0),
    "stall of 5 ms": Fault(stall, ("stall: rank 2 ",), 1.0),
    "dead rank": Fault(dead_rank, ("hang: rank 2 ", "does not answer"), 8.0),
    "cut of a host": Fault(cut, ("hang: rank 2 ", "does not answer"), 8.0),
    "late rank": Fault(late_rank, ("imbalance: rank 3 ",), 6.0),
}

NEED_NETWORK = ("slow link", "slow network of a host", "busy host", "cut of a host")


WARM_SECONDS, REST_SECONDS = 6.0, 7.0
STALLS = 10


def _inject(name: str, fault: Fault, job: Job, log: Log) -> bool:
    """Inject a fault and print the alarms."""
    log.read()
    since, begin = len(log.lines), time.monotonic()
    with fault.inject(job):
        found = log.wait(fault.seconds, fault.expected, since)
        log.read()
        wrong = [alarm for _, alarm in log.lines[since:] if not _is_expected(alarm, fault)]
        after = f"{found[0] - begin:.2f} s" if found else "not found"
        print(f"  {name:<28s}{after:>10s}  {found[1] if found else ''}", flush=True)
        for alarm in wrong:
            print(f"  {'':<28s}{'also':>10s}  {alarm}", flush=True)
    return found is not None


def _is_expected(alarm: str, fault: Fault) -> bool:
    return alarm.startswith("over") or all(word in alarm for word in fault.expected)


def _stalls(job: Job, log: Log) -> bool:
    """Stall repeatedly and count the alarms."""
    fault, found = FAULTS["stall of 5 ms"], []
    for _ in range(STALLS):
        log.read()
        since, begin = len(log.lines), time.monotonic()
        with fault.inject(job):
            match = log.wait(fault.seconds, fault.expected, since)
        found += [(match[0] - begin, match[1])] if match else []
        time.sleep(0.3)
    after = f"{max(time for time, _ in found):.2f} s" if found else "not found"
    print(f"  {'stall of 5 ms':<28s}{after:>10s}  {len(found)} of {STALLS} found; {found[0][1] if found else ''}")
    return bool(found)


def drive(options: argparse.Namespace) -> int:
    """Run the job and inject the faults, if any."""
    possible = [name for name in FAULTS if name not in NEED_NETWORK or not options.here]
    chosen = options.faults.split(",") if options.faults else possible
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        wanted = sum(FAULTS[name].seconds + REST_SECONDS for name in chosen) + 2 * WARM_SECONDS + STALLS
        seconds = options.clean or wanted
        program = [
            sys.executable,
            "-m",
            "osu_bench.experiments.monitor_faults",
            "--rank",
            str(directory),
            "--seconds",
            f"{seconds}",
        ]
        environment = {"MPI_GPUCOMP_LOG": f"{directory}/%r.alarms", "MPI_GPUCOMP_HANG": "5"}
        if options.traces:
            environment["MPI_GPUCOMP_MONITOR"] = options.traces
        program += ["--codec", options.codec]
        if options.here:
            cluster, poll = None, _start_here(program, environment, stack)
        else:
            cluster = stack.enter_context(Cluster.up(HOSTS, RATE, name=options.name))
            poll = stack.enter_context(cluster.start(program, environment=environment)).poll
        job, log = Job(cluster, directory), Log(directory)
        deadline = time.monotonic() + 60
        while len(list(directory.glob("*.pid"))) < HOSTS and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(WARM_SECONDS)
        where = "ranks on one machine" if options.here else "hosts, 1 Gbit/s"
        print(f"# {HOSTS} {where}, Bcast of 16 MB, codec {options.codec}", flush=True)
        return _clean(log, poll, options.clean) if options.clean else _each(chosen, job, log)


def _start_here(program: list[str], environment: dict[str, str], stack: ExitStack) -> Callable[[], int | None]:
    """Start the ranks on this machine, without a cluster."""
    launcher = find()
    added = {**os.environ, **launcher.environment, **environment}
    process = subprocess.Popen(launcher.command(HOSTS, program), env=added, start_new_session=True)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process.poll


def _each(chosen: list[str], job: Job, log: Log) -> int:
    missed = []
    log.read()
    print(f"# before any fault: {len(log.lines)} alarms {[alarm for _, alarm in log.lines]}", flush=True)
    for name in chosen:
        if not (_stalls(job, log) if name == "stall of 5 ms" else _inject(name, FAULTS[name], job, log)):
            missed.append(name)
        time.sleep(REST_SECONDS)
    print(f"# {len(chosen) - len(missed)} of {len(chosen)} named correctly", flush=True)
    return 1 if missed else 0


def _clean(log: Log, over: Callable[[], int | None], seconds: float) -> int:
    until = time.monotonic() + seconds - WARM_SECONDS
    while time.monotonic() < until and over() is None:
        log.read()
        time.sleep(0.2)
    for _, alarm in log.lines:
        print(f"  {alarm}")
    print(f"# {seconds:.0f} s without faults: {len(log.lines)} alarms", flush=True)
    return 1 if log.lines else 0


EXAMPLE = "osu_bench monitor_faults --faults 'slow link,busy host'\nosu_bench monitor_faults --clean 180"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the flags; on a rank, broadcast."""
    about = (__doc__ or "").splitlines()[0]
    parser = CommandParser("osu_bench monitor_faults", about, EXAMPLE)
    parser.add_argument("--faults", help=f"some of: {', '.join(FAULTS)}")
    parser.add_argument("--clean", type=float, metavar="SECONDS", help="inject no fault and count alarms for this long")
    parser.add_argument("--codec", default="none", metavar="SPEC", help="codec of the broadcasts (none)")
    parser.add_argument("--name", default="osumon", help="name of the cluster")
    parser.add_argument("--traces", metavar="DIRECTORY", help="keep the trace buffers of all ranks in this directory")
    parser.add_argument("--here", action="store_true", help="on this machine, without a cluster")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=10.0, help=argparse.SUPPRESS)
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(words)
    if options.rank:
        broadcast(options.rank, options.seconds, options.codec)
        return 0
    if not options.here:
        rootless.enter("monitor_faults", *words)
    return drive(options)


if __name__ == "__main__":
    sys.exit(main())
