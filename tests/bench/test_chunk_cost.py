"""The benchmark of the engine's processor time: its table, and that it verifies what it broadcasts."""

from __future__ import annotations

import numpy as np
import pytest

from osu_bench.experiments import chunk_cost


def test_a_row_for_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    chunk_cost.main(["--sizes", "8,100K", "--chunks", "50", "--rounds", "1"])
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title == "# 3 ranks in one process, processor time of a chunk on a rank, median of 1"
    assert header.split() == ["#", "Chunk", "(bytes)", "Chunks", "raw", "(us)", "framed", "(us)"]
    assert [row.split()[:2] for row in rows] == [["8", "50"], ["102400", "50"]]
    assert all(float(cost) > 0 for row in rows for cost in row.split()[2:])


def test_long_chunks_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_cost, "MOST_BYTES", 4000)
    assert chunk_cost.measure(2, 1000, 100, 1).chunks == 4


def test_other_bytes_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "array_equal", lambda *_: False)
    with pytest.raises(RuntimeError, match=r"^a rank has received other bytes$"):
        chunk_cost.broadcast(2, 8, 3, raw=True)
