"""The memory of a broadcast is bounded by the depth of the pipeline, not by the message."""

from __future__ import annotations

import json

from launch import needs_mpirun, run

pytestmark = needs_mpirun

CHUNK = 1 << 20
SLOTS = 2 * 4
"""Two lanes, each with two slots to receive and two to send."""


def test_staging_does_not_grow_with_the_message():
    done = run(3, "tests/mpi/memory.py", "256")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [rank["pool"] for rank in found["none"]] == [0, 0, 0], "without a codec nothing is staged"
    for codec, ranks in found.items():
        for rank in ranks:
            assert rank["in use"] == 0
            assert rank["allocations"] <= SLOTS, f"{codec}: {rank}"
            assert rank["pool"] <= 2 * SLOTS * 1.5 * CHUNK, f"{codec}: {rank}"
            assert rank["grown"] <= 2 * SLOTS * 1.5 * CHUNK, f"{codec}: {rank}"
