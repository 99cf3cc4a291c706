"""Requests that are dropped, outlive their communicator or hold buffers, under mpirun."""

from __future__ import annotations

import json

import pytest
from launch import needs_mpirun, run

pytestmark = needs_mpirun


@pytest.mark.parametrize(("ranks", "threads"), [(1, "multiple"), (3, "multiple"), (3, "serialized")])
def test_what_is_in_flight_is_kept_completed_or_ended(ranks: int, threads: str) -> None:
    done = run(ranks, "tests/mpi/in_flight.py", environment={"MPI4PY_RC_THREAD_LEVEL": threads})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
