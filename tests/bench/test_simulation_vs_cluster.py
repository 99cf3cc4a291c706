"""The simulation beside a cluster: rows for what both have done."""

from __future__ import annotations

import pytest
from cluster_machine import skip_unless_possible

from mpi_gpucomp.schedule.topology import preset
from osu_bench.experiments import simulation_vs_cluster as simulated

MEGABYTES_64 = 1 << 26


def test_the_wire_is_the_least_that_a_simulation_says() -> None:
    topology = preset("gigabit", 4)
    plain, coded = (simulated.seconds_of(topology, "bcast", codec, MEGABYTES_64) for codec in simulated.CODECS)
    wire = MEGABYTES_64 * 8 / 1e9
    assert wire < plain < 1.1 * wire and wire / 4 < coded < plain


def test_a_cluster_is_profiled_simulated_and_measured(capfd: pytest.CaptureFixture[str]) -> None:
    skip_unless_possible()
    assert simulated.main(["--hosts", "2", "--rates", "1gbit", "-m", "1M", "-i", "1"]) == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines()[-4:]]
    assert [row[:4] for row in rows] == [
        ["2", "1gbit", benchmark, codec] for benchmark in simulated.ALGORITHMS for codec in simulated.CODECS
    ]
    assert all(float(row[4]) > 0 and float(row[5]) > 0 and row[6].endswith("%") for row in rows)
