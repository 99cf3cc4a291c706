"""A communicator whose ranks are on several nodes."""

from __future__ import annotations

from pathlib import Path

from launch import needs_mpirun, run


@needs_mpirun
def test_two_level_algorithms_are_used_on_several_nodes():
    done = run(4, str(Path(__file__).parent / "two_nodes.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "broadcast two_level",
        "broadcast two_level",
        "allreduce two_level",
        "allreduce ring",
        "broadcast chain",
    ]
