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
    assert first["right"] and first["settled"] == [True, True], "a broadcast's and a sum's"
    assert [len(left) for left in first["left"]] == [1, 1]
    assert first["error"] == "AgreementError", "a mistake while ways are tried is one like any other"
    assert all(other == first for other in others)
