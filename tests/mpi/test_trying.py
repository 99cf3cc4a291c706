"""Ways that `auto` tries in turns, on real ranks: nothing is lost, and all come to the same end."""

from __future__ import annotations

import json

import pytest
from launch import needs_mpirun, run

pytestmark = needs_mpirun


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_try_together_and_settle_on_the_same_way(ranks):
    done = run(ranks, "tests/mpi/trying.py")
    assert done.returncode == 0, done.stderr
    first, *others = (json.loads(line.split(" ", 1)[1]) for line in done.stdout.splitlines())
    assert first["right"]
    assert all(first["settled"]), "a broadcast's, a sum's, and those of broadcasts that samples decide"
    assert len(first["left"]) >= 3 and all(len(left) == 1 for left in first["left"])
    assert first["error"] == "AgreementError", "a mistake while ways are tried is one like any other"
    assert all(other == first for other in others)
