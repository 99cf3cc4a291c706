"""Autotuning under mpirun: results stay correct, and all ranks select the same candidate."""

from __future__ import annotations

import json

import pytest
from launch import needs_mpirun, run

pytestmark = needs_mpirun


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_select_the_same_candidate(ranks):
    done = run(ranks, "tests/mpi/autotuning.py")
    assert done.returncode == 0, done.stderr
    first, *others = (json.loads(line.split(" ", 1)[1]) for line in done.stdout.splitlines())
    assert first["right"]
    assert all(first["settled"]), "a broadcast, a sum, and broadcasts that samples decide"
    assert len(first["left"]) >= 3 and all(len(left) == 1 for left in first["left"])
    assert first["error"] == "AgreementError", "a mismatch is found while candidates are explored"
    assert all(other == first for other in others)
