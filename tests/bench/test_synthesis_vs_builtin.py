"""Algorithms made for a network beside all others: the row that says how they compare, and a whole run."""

from __future__ import annotations

import pytest
from cluster_machine import skip_unless_possible

from osu_bench.experiments import synthesis_vs_builtin as uneven


def test_a_row_compares_with_the_best_of_all() -> None:
    times = uneven.Times("bcast", 0.1, {"mpi": 0.5, "mpi-tuned": 0.25, "none@chain": 0.3, "none@tree": 0.2})
    assert times.row == ("bcast", "250", "200", "tree", "100", "0.50 (2.0x)")


@pytest.mark.slow
def test_an_algorithm_is_made_for_racks_and_run(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("highspy")
    skip_unless_possible()
    racks = ["--hosts", "4", "--rate", "1gbit", "--racks", "2", "--uplink", "200mbit"]
    assert uneven.main([*racks, "--collectives", "bcast", "-m", "1M", "-i", "1"]) == 0
    row = capfd.readouterr().out.splitlines()[-1].split()
    assert row[0] == "bcast" and row[-1].endswith("x)")
