"""Run PyTorch's distributed tests against the backend; print what passed, and why the rest did not.

    python tests/torch/conformance.py                 # all tests, as gpucomp, gloo and mpi
    python tests/torch/conformance.py --list tests/torch/conformance.txt --backends gpucomp
    python tests/torch/conformance.py test_broadcast test_all_reduce_sum

A test that exceeds its time limit is counted as hung, and the remaining tests run in a new job. The stderr of the ranks
is appended to the file named by the variable CONFORMANCE_LOG.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BACKENDS = "mpi", "gpucomp", "gloo"
TOO_FEW_RANKS, MANY_RANKS = "small world size", 8
"""Skip reason of tests that need more ranks, and the number that suffices for all."""
TEST_SECONDS = 120.0
"""Time limit of one test."""


class Outcome(NamedTuple):
    """Outcome of a test as one backend."""

    backend: str
    test: str
    kind: str
    why: str
    seconds: float


def run(backends: list[str], ranks: int, selected: list[str]) -> list[Outcome]:
    """Run the tests as each backend; rerun with more ranks those that need more and passed as none."""
    outcomes = [outcome for backend in backends for outcome in _run(backend, ranks, selected)]
    passed = {outcome.test for outcome in outcomes if outcome.kind == "passed"}
    small = {o.test: o for o in outcomes if TOO_FEW_RANKS in o.why and o.test not in passed}
    rerun = {backend: [test for test in small if small[test].backend == backend] for backend in backends}
    rest = [outcome for outcome in outcomes if outcome not in small.values()]
    return rest + [o for backend in backends for o in _run(backend, MANY_RANKS, rerun[backend])]


def _run(backend: str, ranks: int, selected: list[str]) -> list[Outcome]:
    """Run the selected tests, or all except in a rerun, in as many jobs as needed."""
    outcomes: list[Outcome] = []
    if ranks == MANY_RANKS and not selected:
        return outcomes
    first = 0
    while True:
        done, last = _job(backend, ranks, first, selected)
        outcomes += done
        if last is None:
            return outcomes
        first = last + 1


def _job(backend: str, ranks: int, first: int, selected: list[str]) -> tuple[list[Outcome], int | None]:
    """Run tests until all are done or one hangs; return the number of that one."""
    command = [sys.executable, "-W", "ignore", str(HERE / "conformance_rank.py"), backend, str(first), *selected]
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    with open(os.environ.get("CONFORMANCE_LOG", os.devnull), "a") as log:
        job = subprocess.Popen(
            [*launcher, *command], stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=ROOT
        )
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(job, lines), daemon=True).start()
    try:
        return _collect(backend, lines)
    finally:
        job.terminate()
        try:
            job.wait(20)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


def _read(job: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert job.stdout is not None
    for line in job.stdout:
        if line.startswith("@"):
            lines.put(line.rstrip())
    lines.put(None)


def _collect(backend: str, lines: queue.Queue[str | None]) -> tuple[list[Outcome], int | None]:
    """Collect the outcomes of a job until it ends or a test exceeds its time limit."""
    outcomes: list[Outcome] = []
    number, test = -1, ""
    while True:
        try:
            line = lines.get(timeout=TEST_SECONDS)
        except queue.Empty:
            outcomes.append(Outcome(backend, test, "hung", f"not completed after {TEST_SECONDS:.0f} s", TEST_SECONDS))
            return outcomes, number
        if line is None:
            outcomes.append(Outcome(backend, test, "failed", "the job ended early", 0.0))
            return outcomes, number if test else None
        if line == "@done":
            return outcomes, None
        event, _, rest = line.partition(" ")
        if event == "@start":
            number, test = int(rest.split()[0]), rest.split()[1]
        elif event == "@end":
            _, kind, took, *why = rest.split(" ")
            outcomes.append(Outcome(backend, test, kind, " ".join(why), float(took)))
            if kind not in ("passed", "skipped"):
                print(f"{backend} {test}: {kind}: {' '.join(why)}", flush=True)


def report(outcomes: list[Outcome]) -> int:
    """Print counts, failures and skip reasons; return the number of distinct tests passed."""
    passed = {outcome.test for outcome in outcomes if outcome.kind == "passed"}
    failed = [outcome for outcome in outcomes if outcome.kind in ("failed", "hung")]
    skipped = Counter(
        outcome.why for outcome in _last(outcomes) if outcome.test not in passed and outcome.kind == "skipped"
    )
    for backend in dict.fromkeys(outcome.backend for outcome in outcomes):
        kinds = Counter(outcome.kind for outcome in outcomes if outcome.backend == backend)
        print(f"as {backend}: {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}")
    for outcome in failed:
        print(f"{outcome.kind}: {outcome.test} as {outcome.backend}: {outcome.why}")
    for why, count in skipped.most_common():
        print(f"skipped: {count:3} tests: {why}")
    print(f"{len(passed)} distinct tests passed, {len({outcome.test for outcome in failed})} failed or hung")
    return len(passed)


def _last(outcomes: list[Outcome]) -> list[Outcome]:
    """Return one outcome per test, preferably as gloo, for which most tests are written."""
    return list(
        {outcome.test: outcome for outcome in sorted(outcomes, key=lambda outcome: outcome.backend == "gloo")}.values()
    )


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="run only these tests")
    parser.add_argument("--list", type=Path, help="file with test names, one per line")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="backend names under which to run the tests")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--slow", action="store_true", help="print the duration of each test")
    arguments = parser.parse_args()
    selected = list(arguments.tests)
    if arguments.list:
        selected += [line for line in arguments.list.read_text().split() if line]
    outcomes = run(arguments.backends.split(","), arguments.ranks, selected)
    if arguments.slow:
        for outcome in sorted(outcomes, key=lambda outcome: -outcome.seconds):
            print(f"{outcome.seconds:6.1f} s {outcome.kind} {outcome.test} as {outcome.backend}")
    report(outcomes)
    return int(any(outcome.kind in ("failed", "hung") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
