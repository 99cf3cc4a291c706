"""Runs PyTorch's own distributed tests against the backend, and says what passed and why the rest did not.

    python tests/torch/conformance.py                 # everything, under the names gpucomp, gloo and mpi
    python tests/torch/conformance.py --list tests/torch/conformance.txt --names gpucomp
    python tests/torch/conformance.py test_broadcast test_all_reduce_sum

A test that does not end in time is counted as hanging, and the rest goes on in a new job. What the ranks write to
stderr goes to the file that the variable CONFORMANCE_LOG names.
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
NAMES = "mpi", "gpucomp", "gloo"
SMALL, MANY = "small world size", 8
"""What tests say that want more ranks, and how many are enough."""
TEST_SECONDS = 120.0
"""How long one test may take."""


class Outcome(NamedTuple):
    """How a test ended under a name."""

    name: str
    test: str
    kind: str
    why: str
    seconds: float


def run(names: list[str], ranks: int, wanted: list[str]) -> list[Outcome]:
    """Run the tests under each name; what has passed under none because it wants more ranks, again with more."""
    outcomes = [outcome for name in names for outcome in _run(name, ranks, wanted)]
    passed = {outcome.test for outcome in outcomes if outcome.kind == "passed"}
    small = {one.test: one for one in outcomes if SMALL in one.why and one.test not in passed}
    again = [outcome for name in names for outcome in _run(name, MANY, [t for t in small if small[t].name == name])]
    return [outcome for outcome in outcomes if outcome not in small.values()] + again


def _run(name: str, ranks: int, wanted: list[str]) -> list[Outcome]:
    """Run tests in as many jobs as it takes; all if none is named, except for those with more ranks."""
    outcomes: list[Outcome] = []
    if ranks == MANY and not wanted:
        return outcomes
    first = 0
    while True:
        done, last = _job(name, ranks, first, wanted)
        outcomes += done
        if last is None:
            return outcomes
        first = last + 1


def _job(name: str, ranks: int, first: int, wanted: list[str]) -> tuple[list[Outcome], int | None]:
    """Run tests until all are done or one hangs; return that one's number."""
    command = [sys.executable, "-W", "ignore", str(HERE / "conforming.py"), name, str(first), *wanted]
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    with open(os.environ.get("CONFORMANCE_LOG", os.devnull), "a") as log:
        job = subprocess.Popen(
            [*launcher, *command], stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=ROOT
        )
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(job, lines), daemon=True).start()
    try:
        return _follow(name, lines)
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


def _follow(name: str, lines: queue.Queue[str | None]) -> tuple[list[Outcome], int | None]:
    """Collect what a job says, until it is over, or says nothing for too long."""
    outcomes: list[Outcome] = []
    number, test = -1, ""
    while True:
        try:
            line = lines.get(timeout=TEST_SECONDS)
        except queue.Empty:
            outcomes.append(Outcome(name, test, "hung", f"not over after {TEST_SECONDS:.0f} s", TEST_SECONDS))
            return outcomes, number
        if line is None:
            outcomes.append(Outcome(name, test, "failed", "the job ended", 0.0))
            return outcomes, number if test else None
        if line == "@over":
            return outcomes, None
        word, _, rest = line.partition(" ")
        if word == "@start":
            number, test = int(rest.split()[0]), rest.split()[1]
        elif word == "@end":
            _, kind, took, *why = rest.split(" ")
            outcomes.append(Outcome(name, test, kind, " ".join(why), float(took)))
            if kind not in ("passed", "skipped"):
                print(f"{name} {test}: {kind}: {' '.join(why)}", flush=True)


def report(outcomes: list[Outcome]) -> int:
    """Print what passed, what did not and why; return how many distinct tests have passed."""
    passed = {outcome.test for outcome in outcomes if outcome.kind == "passed"}
    wrong = [outcome for outcome in outcomes if outcome.kind in ("failed", "hung")]
    left = Counter(
        outcome.why for outcome in _last(outcomes) if outcome.test not in passed and outcome.kind == "skipped"
    )
    for name in dict.fromkeys(outcome.name for outcome in outcomes):
        kinds = Counter(outcome.kind for outcome in outcomes if outcome.name == name)
        print(f"as {name}: {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}")
    for outcome in wrong:
        print(f"{outcome.kind}: {outcome.test} as {outcome.name}: {outcome.why}")
    for why, count in left.most_common():
        print(f"left out: {count:3} tests: {why}")
    print(f"{len(passed)} distinct tests passed, {len({outcome.test for outcome in wrong})} failed or hung")
    return len(passed)


def _last(outcomes: list[Outcome]) -> list[Outcome]:
    """Return one outcome of each test, the one as gloo if there is one: the most tests are meant for that."""
    return list({outcome.test: outcome for outcome in sorted(outcomes, key=lambda one: one.name == "gloo")}.values())


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="only these")
    parser.add_argument("--list", type=Path, help="a file with the names of tests, one a line")
    parser.add_argument("--names", default=",".join(NAMES), help="the names of backends under which to run them")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--slow", action="store_true", help="print how long each test took")
    arguments = parser.parse_args()
    wanted = list(arguments.tests)
    if arguments.list:
        wanted += [line for line in arguments.list.read_text().split() if line]
    outcomes = run(arguments.names.split(","), arguments.ranks, wanted)
    if arguments.slow:
        for outcome in sorted(outcomes, key=lambda outcome: -outcome.seconds):
            print(f"{outcome.seconds:6.1f} s {outcome.kind} {outcome.test} as {outcome.name}")
    report(outcomes)
    return int(any(outcome.kind in ("failed", "hung") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
