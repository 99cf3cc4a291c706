"""The benchmark of synthesis: its table and its plot."""

from __future__ import annotations

from pathlib import Path

import pytest

from osu_bench.experiments.synthesis_scaling import main


def test_a_table_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "growth.png"
    assert main(["--ranks", "8", "16", "--collective", "allgather", "--time", "2", "--plot", str(plot)]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["ranks", "collective", "seconds"]
    assert [row.split()[:2] for row in rows] == [["8", "allgather"], ["16", "allgather"]]
    assert plot.read_bytes().startswith(b"\x89PNG")
