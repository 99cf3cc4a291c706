"""The command `algorithms`: the table, schedules as text and XML, and its errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpi_gpucomp.cli.main import main
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.schedule.msccl_xml import read, write

ROOT = Path(__file__).resolve().parents[2]

REDUCING = """\
collective      algorithm  description                      best for
reduce_scatter  ring       reduces around a ring            long vectors
reduce_scatter  halving    exchanges halves, quarters, ...  short vectors, few lossy steps, ranks a power of two
"""

CHAIN = """\
broadcast chain, 3 ranks, root 1, in place
chunks per loop: 1; latency steps: 2
maximum per rank: messages sent 1, bytes sent 1, bytes received 1

rank 0
  lane 0: from 2, channel 0
    0  receive o[0]

rank 1
  lane 0: to 2, channel 0
    0  send o[0]

rank 2
  lane 0: from 1 to 0, channel 0
    0  receive o[0], forward it
"""

GATHER = """\
rank 2, scratch for 2 chunks
  lane 0: local
    0  copy i[0] to s[0]
  lane 1: from 3, channel 0
    0  receive s[1]
  lane 2: to 0, channel 0
    0  send s[0..1], after lane 0 step 0 and lane 1 step 0
"""


def test_the_table_of_all_collectives():
    command = [sys.executable, "-m", "mpi_gpucomp", "algorithms"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 25
    assert lines[0].split() == ["collective", "algorithm", "description", "best", "for"]
    assert lines[1] == (
        "broadcast       chain                     forwards chunks from rank to rank                   long vectors"
    )


def test_one_collective(capsys: pytest.CaptureFixture[str]):
    assert main(["algorithms", "reduce_scatter"]) == 0
    assert capsys.readouterr().out == REDUCING


def test_a_schedule_as_text(capsys: pytest.CaptureFixture[str]):
    assert main(["algorithms", "broadcast", "--algorithm", "chain", "--ranks", "3", "--root", "1"]) == 0
    assert capsys.readouterr().out == CHAIN
    assert main(["algorithms", "Gather", "--algorithm", "binomial"]) == 0
    assert GATHER in capsys.readouterr().out


def test_xml_and_nodes(capsys: pytest.CaptureFixture[str]):
    options = ["--ranks", "4", "--nodes", "0,3/1,2", "--in-place", "--xml"]
    assert main(["algorithms", "allgather", "--algorithm", "two_level", *options]) == 0
    expected = build("allgather", "two_level", 4, nodes=[[0, 3], [1, 2]], in_place=True)
    assert read(capsys.readouterr().out).programs[0].lanes[0] == expected.programs[0].lanes[0]
    assert main(["algorithms", "reduce_scatter", "--algorithm", "halving", "--ranks", "2"]) == 0
    assert capsys.readouterr().out.startswith("reduce_scatter halving, 2 ranks\n")


def test_the_schedule_of_an_xml_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "ring.xml"
    file.write_text(write(build("allgather", "ring", 4)))
    assert main(["algorithms", "allgather", "--algorithm", str(file)]) == 0
    assert capsys.readouterr().out.startswith("allgather ring, 4 ranks\n")
    assert main(["algorithms", "broadcast", "--algorithm", str(file)]) == 2
    assert capsys.readouterr().err == (
        f"python -m mpi_gpucomp: file {file}: expected broadcast, got allgather. Name its collective: allgather.\n"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["chian"], "algorithm: expected one of ring, halving, got 'chian'. "),
        (["halving", "--root", "9"], "root: expected a rank from 0 to 3, got 9. Ranks are counted from 0."),
    ],
)
def test_invalid_values(capsys: pytest.CaptureFixture[str], args: list[str], message: str):
    assert main(["algorithms", "reduce_scatter", "--algorithm", *args]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["scan"],
            "argument COLLECTIVE: expected one of broadcast, reduce, allreduce, allgather, reduce_scatter, alltoall, "
            "gather, scatter, got 'scan'",
        ),
        (["--algorithm", "chain"], "--algorithm requires COLLECTIVE"),
        (["broadcast", "--in-place"], "--in-place requires --algorithm"),
        (["--algorithm", "halving", "--nodes", "a"], "expected ranks such as 0,1/2,3, got 'a'"),
    ],
)
def test_invalid_arguments(capsys: pytest.CaptureFixture[str], args: list[str], message: str):
    with pytest.raises(SystemExit) as caught:
        main(["algorithms", *args])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"{message}\n")
