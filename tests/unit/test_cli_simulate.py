"""The command `simulate`: one algorithm, the comparison of all, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_topology import two_nodes

from mpi_gpucomp.cli.main import main
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.schedule.msccl_xml import write
from mpi_gpucomp.schedule.topology import PRESETS, write_topology

SIMULATED = """\
topology    gigabit, 4 nodes
collective  broadcast chain, 4 ranks
message     64 MB in chunks of 1 MB, codec none
time        538.1 ms
busiest     0 -> 1: 64 MB, utilization 100%
messages    192

critical path  times       ms
0 -> 1            64  536.921
1 -> 2             1    0.574
2 -> 3             1    0.574
"""


def test_a_preset(capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", "bcast", "--topology", "gigabit", "--ranks", "4", "--size", "64MB"]) == 0
    assert capsys.readouterr().out == SIMULATED


def test_a_thousand_ranks_with_a_codec(capsys: pytest.CaptureFixture[str]):
    words = ["--topology", "dgx-a100", "--ranks", "1024", "--size", "16MB", "--codec", "zfp:rate=8"]
    assert main(["simulate", "Bcast", *words]) == 0
    output = capsys.readouterr().out
    assert "broadcast chain, 1024 ranks" in output
    assert "...                1015 more" in output


def test_a_file_a_trace_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_topology(two_nodes(pairs={}), tmp_path / "topo.json")
    (tmp_path / "ring.xml").write_text(write(build("allgather", "ring", 4)))
    files = ["--trace", str(tmp_path / "trace.json"), "--plot", str(tmp_path / "plot.png")]
    words = ["--topology", str(tmp_path / "topo.json"), "--codec", "zfp:rate=8"]
    assert main(["simulate", "allgather", *words, "--algorithm", str(tmp_path / "ring.xml"), *files]) == 0
    assert "allgather ring, 4 ranks" in capsys.readouterr().out
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_comparison_of_all_algorithms(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_topology(two_nodes(pairs={}), tmp_path / "topo.json")
    assert main(["simulate", "bcast", "--compare", "--topology", str(tmp_path / "topo.json"), "--size", "8MB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "broadcast of 8 MB on two nodes, 4 ranks"
    assert lines[2].split() == ["algorithm", "codec", "chunk", "predicted", "relative", "busiest"]
    assert len(lines) == 3 + 10
    assert [line.split()[1] for line in lines[3:5]] == ["zfp:rate=8"] * 2
    times = [float(line.split(" ms")[0].split()[-1]) for line in lines[3:]]
    assert times == sorted(times)


def test_the_comparison_skips_algorithms_without_links(capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", "allreduce", "--compare", "--topology", "ndv2", "--ranks", "8", "--codec", "none"]) == 0
    output = capsys.readouterr().out
    assert "skipped tree: expected a link from rank 1 to rank 4, which the schedule uses, got none\n" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--topology", "ndv2"], "option --ranks: expected a number of ranks for a preset, got none. Add it: "),
        (
            ["--topology", "dgx9"],
            f"topology: expected one of {', '.join(PRESETS)}, got 'dgx9'. ",
        ),
        (
            ["--topology", "ndv2", "--ranks", "8", "--codec", "split"],
            "codec split: expected a codec that topology ndv2, 1 node has costs for: zfp:rate=16, zfp:rate=8, ",
        ),
    ],
)
def test_invalid_values(capsys: pytest.CaptureFixture[str], words: list[str], message: str):
    assert main(["simulate", "bcast", *words]) == 2
    assert capsys.readouterr().err.startswith(f"python -m mpi_gpucomp: {message}")


def test_files_for_another_collective_or_number_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = str(tmp_path / "topo.json")
    write_topology(two_nodes(), file)
    assert main(["simulate", "bcast", "--topology", file, "--ranks", "5"]) == 2
    assert capsys.readouterr().err == (
        f"python -m mpi_gpucomp: option --ranks: expected 4, as {file} has, got 5. Omit the option.\n"
    )
    ring = tmp_path / "ring.xml"
    ring.write_text(write(build("allgather", "ring", 4)))
    assert main(["simulate", "bcast", "--topology", file, "--algorithm", str(ring)]) == 2
    assert capsys.readouterr().err == (
        f"python -m mpi_gpucomp: file {ring}: expected broadcast, got allgather. Name its collective: allgather.\n"
    )


def test_an_invalid_size(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["simulate", "bcast", "--topology", "gigabit", "--ranks", "2", "--size", "many"])
    assert capsys.readouterr().err.endswith("expected a size such as 512K or 64MB, got 'many'\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--codec", "none", "zfp:rate=8"], "several codecs require --compare"),
        (["--plans", "plans"], "--plans requires --compare"),
        (["--compare", "--chunk", "1M"], "--chunk conflicts with --compare"),
    ],
)
def test_options_that_do_not_go_together(capsys: pytest.CaptureFixture[str], words: list[str], message: str):
    with pytest.raises(SystemExit) as caught:
        main(["simulate", "bcast", *words])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"{message}\n")
