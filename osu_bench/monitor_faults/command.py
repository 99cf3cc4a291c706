"""The command: runs the job, makes one fault after the other, and prints what was said of each."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import osu_bench.monitor_faults
from osu_bench.cluster import Cluster
from osu_bench.launcher import find
from osu_bench.monitor_faults.faults import FAULTS, HOSTS, NEED_NETWORK, RATE, Job
from osu_bench.monitor_faults.log import Log
from osu_bench.monitor_faults.ranks import broadcast

if TYPE_CHECKING:
    from collections.abc import Callable

    from osu_bench.monitor_faults.faults import Fault

__all__ = ["main"]

WARM_SECONDS, REST_SECONDS = 6.0, 7.0
STALLS = 10


def _try(name: str, fault: Fault, job: Job, log: Log) -> bool:
    """Make a fault, and print what was said of it."""
    log.look()
    since, begin = len(log.lines), time.monotonic()
    with fault.make(job):
        found = log.wait(fault.seconds, fault.expected, since)
        log.look()
        wrong = [said for _, said in log.lines[since:] if not _is_expected(said, fault)]
        after = f"{found[0] - begin:.2f} s" if found else "not found"
        print(f"  {name:<28s}{after:>10s}  {found[1] if found else ''}", flush=True)
        for said in wrong:
            print(f"  {'':<28s}{'also':>10s}  {said}", flush=True)
    return found is not None


def _is_expected(said: str, fault: Fault) -> bool:
    return said.startswith("over") or all(word in said for word in fault.expected)


def _stalls(job: Job, log: Log) -> bool:
    """Stall often, and count."""
    fault, found = FAULTS["stall of 5 ms"], []
    for _ in range(STALLS):
        log.look()
        since, begin = len(log.lines), time.monotonic()
        with fault.make(job):
            heard = log.wait(fault.seconds, fault.expected, since)
        found += [(heard[0] - begin, heard[1])] if heard else []
        time.sleep(0.3)
    after = f"{max(time for time, _ in found):.2f} s" if found else "not found"
    print(f"  {'stall of 5 ms':<28s}{after:>10s}  {len(found)} of {STALLS} found; {found[0][1] if found else ''}")
    return bool(found)


def drive(options: argparse.Namespace) -> int:
    """Run the job and make the faults, or none."""
    possible = [name for name in FAULTS if name not in NEED_NETWORK or not options.here]
    chosen = options.faults.split(",") if options.faults else possible
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        wanted = sum(FAULTS[name].seconds + REST_SECONDS for name in chosen) + 2 * WARM_SECONDS + STALLS
        seconds = options.clean or wanted
        program = [
            sys.executable,
            "-m",
            "osu_bench.monitor_faults",
            "--rank",
            str(directory),
            "--seconds",
            f"{seconds}",
        ]
        environment = {"MPI_GPUCOMP_LOG": f"{directory}/%r.alarms", "MPI_GPUCOMP_HANG": "5"}
        if options.boxes:
            environment["MPI_GPUCOMP_MONITOR"] = options.boxes
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
    """Start the ranks on this machine."""
    launcher = find()
    added = {**os.environ, **launcher.environment, **environment}
    process = subprocess.Popen(launcher.command(HOSTS, program), env=added, start_new_session=True)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process.poll


def _each(chosen: list[str], job: Job, log: Log) -> int:
    missed = []
    log.look()
    print(f"# before any fault: {len(log.lines)} alarms {[said for _, said in log.lines]}", flush=True)
    for name in chosen:
        if not (_stalls(job, log) if name == "stall of 5 ms" else _try(name, FAULTS[name], job, log)):
            missed.append(name)
        time.sleep(REST_SECONDS)
    print(f"# {len(chosen) - len(missed)} of {len(chosen)} named rightly", flush=True)
    return 1 if missed else 0


def _clean(log: Log, over: Callable[[], int | None], seconds: float) -> int:
    until = time.monotonic() + seconds - WARM_SECONDS
    while time.monotonic() < until and over() is None:
        log.look()
        time.sleep(0.2)
    for _, said in log.lines:
        print(f"  {said}")
    print(f"# {seconds:.0f} s without a fault: {len(log.lines)} alarms", flush=True)
    return 1 if log.lines else 0


def main() -> int:
    """Read the flags; on a rank, broadcast."""
    about = (osu_bench.monitor_faults.__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="osu_bench.monitor_faults", description=about)
    parser.add_argument("--faults", help=f"some of: {', '.join(FAULTS)}")
    parser.add_argument("--clean", type=float, metavar="SECONDS", help="make no fault, and count alarms")
    parser.add_argument("--codec", default="none")
    parser.add_argument("--name", default="osumon", help="of the cluster")
    parser.add_argument("--boxes", metavar="DIRECTORY", help="keep the boxes of all ranks there")
    parser.add_argument("--here", action="store_true", help="on this machine, with no cluster")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=10.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        broadcast(options.rank, options.seconds, options.codec)
        return 0
    return drive(options)
