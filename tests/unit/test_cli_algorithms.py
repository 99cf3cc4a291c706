"""The command `algorithms`, as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpi_gpucomp.cli.main import main
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.schedule.msccl_xml import read

ROOT = Path(__file__).resolve().parents[2]

REDUCING = """\
collective      algorithm  what it does                     good for
reduce_scatter  ring       reduces around a ring            long vectors
reduce_scatter  halving    exchanges halves, quarters, ...  short vectors, few lossy steps, ranks a power of two
"""

CHAIN = """\
broadcast chain, 3 ranks, root 1, in place
chunks in a loop: 1; longest chain of messages: 2
most for one rank: messages sent 1, bytes sent 1, bytes received 1

rank 0
  lane 0: from 2, channel 0
    0  receive o[0]

rank 1
  lane 0: to 2, channel 0
    0  send o[0]

rank 2
  lane 0: from 1 to 0, channel 0
    0  receive o[0], send it on
"""

GATHER = """\
rank 2, scratch for 2 chunks
  lane 0: inside the rank
    0  copy i[0] to s[0]
  lane 1: from 3, channel 0
    0  receive s[1]
  lane 2: to 0, channel 0
    0  send s[0..1], after lane 0 step 0 and lane 1 step 0
"""


def test_the_whole_table_in_a_process_of_its_own():
    command = [sys.executable, "-m", "mpi_gpucomp", "algorithms"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 25
    assert lines[0].split() == ["collective", "algorithm", "what", "it", "does", "good", "for"]
    assert lines[1] == (
        "broadcast       chain                     forwards chunks from rank to rank                   long vectors"
    )


def test_one_collective(capsys: pytest.CaptureFixture[str]):
    assert main(["algorithms", "reduce_scatter"]) == 0
    assert capsys.readouterr().out == REDUCING


def test_a_drawing(capsys: pytest.CaptureFixture[str]):
    assert main(["algorithms", "show", "chain", "--collective", "broadcast", "--ranks", "3", "--root", "1"]) == 0
    assert capsys.readouterr().out == CHAIN
    assert main(["algorithms", "show", "binomial", "--collective", "gather"]) == 0
    assert GATHER in capsys.readouterr().out


def test_xml_and_nodes(capsys: pytest.CaptureFixture[str]):
    options = ["--ranks", "4", "--nodes", "0,3/1,2", "--in-place", "--xml"]
    assert main(["algorithms", "show", "two_level", "--collective", "allgather", *options]) == 0
    expected = build("allgather", "two_level", 4, nodes=[[0, 3], [1, 2]], in_place=True)
    assert read(capsys.readouterr().out).programs[0].lanes[0] == expected.programs[0].lanes[0]
    assert main(["algorithms", "show", "halving", "--ranks", "2"]) == 0
    assert capsys.readouterr().out.startswith("reduce_scatter halving, 2 ranks\n")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["scan"],
            "collective: expected one of broadcast, reduce, allreduce, allgather, reduce_scatter, alltoall, gather, "
            "scatter, got 'scan'. List them with `python -m mpi_gpucomp algorithms`.",
        ),
        (
            ["show", "chain"],
            "option --collective: expected one of broadcast, reduce, got none. "
            "Choose one with --collective, such as --collective broadcast.",
        ),
        (
            ["show", "chian"],
            "algorithm: expected one of chain, tree, binomial, scatter_allgather, two_level, ring, recursive_doubling, "
            "reduce_scatter_allgather, bruck, halving, pairwise, linear, got 'chian'. "
            "List them with `python -m mpi_gpucomp algorithms`.",
        ),
        (["show", "halving", "--root", "9"], "root: expected a rank from 0 to 3, got 9. Ranks are counted from 0."),
    ],
)
def test_wrong_names(capsys: pytest.CaptureFixture[str], args: list[str], said: str):
    assert main(["algorithms", *args]) == 2
    assert capsys.readouterr().err == f"python -m mpi_gpucomp: {said}\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["show"], "show wants the NAME of an algorithm"),
        (["broadcast", "chain"], "NAME goes with show"),
        (["broadcast", "--in-place"], "--in-place goes with show"),
        (["show", "halving", "--nodes", "a"], "expected ranks such as 0,1/2,3, got 'a'"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], args: list[str], said: str):
    with pytest.raises(SystemExit) as caught:
        main(["algorithms", *args])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"{said}\n")
