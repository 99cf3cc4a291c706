"""What a broadcast takes of memory: bounded by the depth of the pipeline, whatever the message."""

from __future__ import annotations

import json

from launch import needs_mpirun, run

pytestmark = needs_mpirun

CHUNK = 1 << 20
FRAMES = 2 * 4
"""Those of two lanes, each with two arriving and two leaving."""


def test_staging_does_not_grow_with_the_message():
    done = run(3, "tests/mpi/memory.py", "256")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [rank["pool"] for rank in told["none"]] == [0, 0, 0], "elements leave from and arrive at where they are"
    for codec, ranks in told.items():
        for rank in ranks:
            assert rank["in use"] == 0
            assert rank["allocations"] <= FRAMES, f"{codec}: {rank}"
            assert rank["pool"] <= 2 * FRAMES * 1.5 * CHUNK, f"{codec}: {rank}"
            assert rank["grown"] <= 2 * FRAMES * 1.5 * CHUNK, f"{codec}: {rank}"
