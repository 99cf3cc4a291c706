"""Ranks that start collectives in different orders: all complete, while the same program fails on MPI and gloo."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from launch import ROOT, needs_mpirun, run

from osu_bench.experiments.any_order import CODECS, DTYPES, KINDS, OPERATIONS, Call, draw, shuffled

STRESS = int(os.environ.get("MPI_GPUCOMP_STRESS", "0"))
LONGEST = 60
"""Seconds of one run of the stress program, which is repeated until the time is over."""
SECONDS = r"\d+\.\d\d s"


def demonstrate(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "osu_bench.experiments.any_order", "demonstrate", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=ROOT, env=environment, check=False)


def test_random_collectives_cover_all_kinds():
    drawn = draw(1, 200, 8)
    assert {one.kind for one in drawn} == {*KINDS} and {one.root for one in drawn} == {*range(8)}
    codecs = {(dtype, codec) for dtype in DTYPES for codec in CODECS.get(dtype, ["none"])}
    assert {(one.dtype, one.codec) for one in drawn} == codecs
    assert {one.op for one in drawn} == {*OPERATIONS}
    lengths = [max(array.nbytes for array in (one.sent(0), one.expected(one.root))) for one in drawn]
    assert min(lengths) < 32 and 1 << 19 < max(lengths) <= 1 << 20
    assert draw(1, 200, 8) == drawn != draw(2, 200, 8)


def test_every_rank_has_a_different_order():
    numbers = [*range(200)]
    orders = {tuple(shuffled(numbers, seed, rank)) for seed in (1, 2) for rank in range(8)}
    assert len(orders) == 16 and all(sorted(order) == numbers for order in orders)


@pytest.mark.parametrize("one", draw(3, 24, 4, 4096), ids=lambda one: one.name)
def test_a_wrong_element_is_detected(one):
    call = Call(one, one.root)
    call.reset()
    assert call.wrong() or one.kind == "bcast"
    np.copyto(call.receive, one.expected(one.root))
    assert not call.wrong()
    call.receive[-1] += 1
    assert call.wrong()


@needs_mpirun
def test_200_collectives_on_8_ranks_in_2_slots():
    done = run(8, "-m", "mpi4py", "tests/mpi/any_order.py", "1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 8: 200 collectives right" for rank in range(8)]


@needs_mpirun
@pytest.mark.parametrize(("candidate", "ranks"), [("mpi", 8), ("gloo", 4)])  # each rank of gloo has to import torch
def test_the_same_program_without_names_hangs_or_fails(candidate, ranks):
    if candidate == "gloo":
        pytest.importorskip("torch")
    done = demonstrate(f"--candidates={candidate}", f"--ranks={ranks}", "--limit=5")
    assert done.returncode == 0, done.stderr
    title, became = done.stdout.splitlines()
    assert title == f"# 200 collectives on {ranks} ranks, 2 slots, seed 1; complete in order, then shuffled:"
    bad = r"hung: not complete after 0:00:\d\d|failed: .+|rank \d: wrong results of \d+ of 200 collectives, .+"
    assert re.fullmatch(rf"{candidate} +{SECONDS} +({bad})", became), became


@needs_mpirun
def test_our_line_of_the_demonstration():
    done = demonstrate("--candidates=ours", "--ranks=3", "--collectives=30", "--limit=60")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(rf"ours +{SECONDS} +right results, {SECONDS}", done.stdout.splitlines()[1])


@needs_mpirun
def test_table_of_alternating_runs():
    done = run(3, "-m", "osu_bench.experiments.any_order", "--collectives=30", "--repeat=1", "--candidates=mpi")
    assert done.returncode == 0, done.stderr
    title, columns, *rows = done.stdout.strip().splitlines()
    assert title == "# 30 collectives on 3 ranks, 2 slots, seed 1: median of 1 alternating runs, all verified"
    assert columns.split() == ["#", "candidate", "started", "Time", "(ms)", "shuffled", "/", "this"]
    assert [row.split()[:2] for row in rows] == [["ours", "shuffled"], ["ours", "in"], ["mpi", "in"]]
    assert rows[0].split()[-1] == "1.00"


def test_an_unknown_candidate_is_an_error():
    done = demonstrate("--candidates=nccl")
    assert done.returncode == 2
    assert done.stderr.endswith("error: expected some of ours, mpi, gloo, got nccl\n")


@needs_mpirun
@pytest.mark.skipif(not STRESS, reason="long: set MPI_GPUCOMP_STRESS to the seconds that it may take")
@pytest.mark.parametrize("ranks", [3, 8])
def test_stress(ranks):
    left, seed = STRESS // 2, 1
    while left > 0:
        done = run(ranks, "-m", "mpi4py", "tests/mpi/any_order.py", str(seed), str(min(left, LONGEST)))
        assert done.returncode == 0, f"from seed {seed} on: {done.stderr}"
        assert len({re.sub(r"^rank \d+", "", line) for line in done.stdout.splitlines()}) == 1
        left, seed = left - LONGEST, seed + 100_000
