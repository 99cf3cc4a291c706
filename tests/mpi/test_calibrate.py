"""Calibration under mpirun: every rank gets the same figures, and therefore the same plans."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from launch import needs_mpirun, run

from mpi_gpucomp.codec.auto import CODINGS

pytestmark = needs_mpirun


def found(ranks: int) -> list[list[dict]]:
    """Return the results of each rank."""
    done = run(ranks, "tests/mpi/calibration.py")
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    return [[json.loads(text) for number, text in lines if number == str(rank)] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_get_the_same_figures(ranks):
    first, *others = found(ranks)
    assert [facts.get("collective") for facts in first] == ["broadcast", "allreduce", "allgather", None]
    assert all(other == first for other in others)
    assert first[-1] == {"arrived": True}
    *calibrated, _ = first
    for facts in calibrated:
        (latency, per_byte), own, plain, per_hop, scale, placed, relay_bytes = facts["figures"]
        assert placed is None and relay_bytes == 0  # all on one node
        assert latency > 0 and per_byte >= 0 and per_hop >= 0 and scale > 0
        sizes, times = zip(*own, strict=True)
        assert sizes[0] >= 1 << 16 and all(low < high for low, high in pairwise(sizes)) and min(times) > 0
        assert (facts["costs"], [latency, per_byte]) == (calibrated[0]["costs"], calibrated[0]["figures"][0])
        costs = facts["costs"]
        assert costs["wire"] == per_byte and costs["sample"] > 0 and plain[:2] == costs["coding"]["none uint8"]
        assert list(costs["coding"]) == [f"{codec.name} {name}" for codec, name in CODINGS]
        assert all(0 < seconds < 1 for speeds in costs["coding"].values() for seconds in speeds)


def test_one_rank_alone_measures_nothing():
    ((*calibrated, arrived),) = found(1)
    assert arrived == {"arrived": True}
    for facts in calibrated:
        assert facts["figures"][:2] == [[0, 0], [[1, 0]]]
        assert facts["choices"] == [[None, 1 << 20, False]] * 9
