"""Ranks that are killed, stopped or interrupted, or exit with an error: the others get an error, and nothing hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from launch import LAUNCHER, ROOT, needs_mpirun

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_mpirun

SECONDS = 90
"""A job that takes longer hangs."""
HAS_ULFM = LAUNCHER is not None and LAUNCHER.mpi == "openmpi"
needs_ulfm = pytest.mark.skipif(not HAS_ULFM, reason="only Open MPI tolerates failed ranks: --with-ft ulfm")


class Started:
    """A program on several ranks, which write their process ids to a directory."""

    def __init__(self, directory: Path, ranks: int, case: str, victim: int, *options: str) -> None:
        self._directory, self._ranks = directory, ranks
        program = [sys.executable, "tests/mpi/rank_failure.py", case, str(victim), str(directory)]
        self.process = subprocess.Popen(
            LAUNCHER.command(ranks, program, options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )

    def ids(self) -> dict[int, int]:
        """Return the process id of every rank that has started."""
        return {int(file.stem): int(file.read_text()) for file in self._directory.glob("*.pid")}

    def wait_until_begun(self) -> dict[int, int]:
        deadline = time.monotonic() + SECONDS
        while len(self.ids()) < self._ranks:
            assert time.monotonic() < deadline and self.process.poll() is None, "the ranks do not start"
            time.sleep(0.05)
        time.sleep(0.5)
        return self.ids()

    def end(self) -> tuple[int, str, str]:
        """Wait for the job; return its status and output, and check that no rank is left."""
        output, errors = self.process.communicate(timeout=SECONDS)
        deadline = time.monotonic() + 5
        while left := [rank for rank, number in self.ids().items() if runs(number)]:
            assert time.monotonic() < deadline, f"ranks {left} are still running"
            time.sleep(0.05)
        return self.process.returncode, output, errors

    def clear(self) -> None:
        """Kill what a failed test has left."""
        for number in (*self.ids().values(), self.process.pid):
            if runs(number):
                os.kill(number, signal.SIGKILL)
        self.process.communicate()


def runs(number: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{number}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    """Start programs, and kill what is left of them after the test."""
    programs: list[Started] = []

    def start(*args: object) -> Started:
        programs.append(Started(tmp_path, *args))
        return programs[-1]

    yield start
    for program in programs:
        program.clear()


@needs_ulfm
@pytest.mark.parametrize("victim", range(4))
def test_survivors_get_an_error_that_names_the_dead_rank_and_continue(start, victim):
    status, output, errors = start(4, "survive", victim, "--with-ft", "ulfm").end()
    assert status == 0, output + errors
    ranks = [0, 1, 2, 3]
    for number in range(2):
        results = dict(re.findall(rf"^{number} (\d+ \w+(?: \d+)?): (.*)$", output, re.MULTILINE))
        place = victim % len(ranks)
        dead, survivors = ranks[place], ranks[:place] + ranks[place + 1 :]
        text = "communicator: expected all ranks alive, got rank"
        for old, rank in enumerate(ranks):
            if rank != dead:
                error = results[f"{rank} was {old}"]
                # A rank whose part was complete gets the error in its next call.
                assert error == "no error" or re.fullmatch(
                    rf"RankFailedError: rank {old}: {text} {place} dead \(MPI error: .+\)\. "
                    r"Continue without them: new = comm\.Shrink\(\)\.",
                    error,
                ), output
                assert results[f"{rank} again"] == "RankFailedError"
                assert results[f"{rank} is {survivors.index(rank)}"] == f"right on {len(survivors)} ranks"
        assert any("RankFailedError" in results[f"{rank} was {ranks.index(rank)}"] for rank in survivors)
        ranks = survivors


def test_a_killed_rank_ends_the_job_without_fault_tolerance(start):
    status, output, errors = start(3, "killed", 1).end()
    assert status != 0
    if HAS_ULFM:
        assert re.search(r"process rank 1 .* exited on\s+signal 9 \(Killed\)", output + errors, re.DOTALL)


def test_a_stopped_rank_is_named_within_the_timeout(start):
    status, output, errors = start(4, "stopped", 2).end()
    assert status != 0
    for rank in (0, 1, 3):
        error = re.search(rf"^{rank}: (.*)$", output, re.MULTILINE)
        assert error, output + errors
        assert re.fullmatch(
            rf"RankFailedError: rank {rank}: allreduce \(call \d+\): expected every rank to report after it failed, "
            r"and all messages to arrive, got no report from rank 2\. "
            r"Make a new communicator without the failed ranks; this one cannot be used any more\.",
            error[1],
        ), output


def test_interrupting_the_launcher_ends_all_ranks(start):
    job = start(3, "busy", 0)
    job.wait_until_begun()
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] != 0


def test_interrupting_one_rank_ends_the_job_with_a_reason(start):
    job = start(3, "waiting", 0)
    os.kill(job.wait_until_begun()[1], signal.SIGINT)
    assert_rank_1_was_interrupted(job)


def test_interrupting_one_rank_in_the_progress_engine_ends_the_job(start):
    assert_rank_1_was_interrupted(start(3, "interrupted_in_poll", 0))


def assert_rank_1_was_interrupted(job: Started) -> None:
    status, output, errors = job.end()
    assert status != 0
    assert "KeyboardInterrupt" in errors
    why = "rank 1 exits with KeyboardInterrupt during allreduce 'weights': aborting the job"
    assert why in errors, output + errors


def test_an_error_that_ends_one_rank_reaches_the_ranks_that_would_wait_for_it(start):
    status, output, errors = start(3, "raising", 1).end()
    assert status != 0
    assert "ValueError: a mistake here" in errors
    for rank in (0, 2):
        assert (
            f"{rank}: PeerError: rank {rank}: communicator: expected no rank to abort, got on rank 1 ValueError: "
            "a mistake here. Make a new communicator; this one cannot be used any more.\n"
        ) in output


def test_a_request_that_is_not_waited_for_is_completed_at_exit(start):
    status, output, errors = start(3, "not_waited_for", 1).end()
    assert status == 0, errors
    assert sorted(output.split()) == ["0:", "2:", "right", "right"]
