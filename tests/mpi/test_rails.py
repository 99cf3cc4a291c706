"""Rails under mpirun, on two loopback addresses: everything that a communicator does, while paths break."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launch import needs_mpirun, run

pytestmark = needs_mpirun

IN_TURN, AT_ONCE = "127.0.0.1,127.0.0.2", "127.0.0.1+127.0.0.2"
RANKS = 3
STILL = "a_peer_that_stands_still"
REMEDY = "See to the network or to the rank; this communicator cannot be used any more."


def told(rails: str, *cases: str) -> list[dict[str, Any]]:
    done = run(RANKS, "-m", "mpi4py", "tests/mpi/railed.py", rails, *cases)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("rails", [IN_TURN, AT_ONCE])
def test_every_byte_arrives_whatever_breaks(rails: str) -> None:
    cases = ("collectives_under_cuts", "messages_under_cuts", "both_ways_at_once", "no_copies")
    right = {**dict.fromkeys(cases[:3], 0), "no_copies": [0, 1]}
    assert told(rails, *cases) == [right] * RANKS


def test_strangers_are_refused_and_settings_checked() -> None:
    for rank, found in enumerate(told(IN_TURN, "strangers", "wrong_settings", "settings_are_passed_on")):
        assert found["strangers"] == ["0 left", "0 heard anything", "0 cuts"]
        missing, different, twice, no_time = found["wrong_settings"]
        assert missing.startswith(
            f"SpecError: rank {rank}: rails: expected devices that every rank has, got rank 1: rails: expected network "
            "devices with an IPv4 address, by name, address or network, got 'nosuch0'. This machine has lo (127.0.0.1)"
        )
        assert missing.endswith(". Name devices that are there, or networks, which fit all ranks.")
        assert different == (
            f"SpecError: rank {rank}: rails: expected the same number and order of devices on every rank, "
            "got rank 0: [[0]]; rank 1: [[0], [1]]; rank 2: [[0]]. Pass the same rails on every rank."
        )
        assert twice == (
            "SpecError: rails: expected devices that differ, such as eth0,eth1 or eth0+eth1, got 'lo,lo'. "
            "Name each device once."
        )
        assert no_time == "SpecError: timeout of rails: expected seconds, more than 0, got 0. Give a time."
        totals = [[[3.0] * 3, True, True], [[3.0] * 3, True, True], [[1.0 if rank == 1 else 2.0] * 3, True, True]]
        assert found["settings_are_passed_on"] == totals


def test_a_peer_that_stands_still_is_not_given_up() -> None:
    """Its kernel still answers for it; when it goes on, nothing has been lost."""
    for rank, (right, lost, rails) in enumerate(one["a_peer_that_stands_still"] for one in told(IN_TURN, STILL)):
        assert right and (lost == [] or rank == 1)  # the one that stood still cannot know that its clock did too
        assert rails == ["127.0.0.1"] or lost


def test_all_ranks_hear_of_one_that_is_gone() -> None:
    done = run(RANKS, "tests/mpi/railed.py", IN_TURN, "a_rank_that_is_gone")
    for rank, found in enumerate(json.loads(done.stdout.splitlines()[0])):
        expected = (
            rf"RankFailedError: rank {rank}: rails: expected all ranks to be there, got no way from rank 0 to rank 1: "
            f"nobody listens on its ports any more. {REMEDY}"
        )
        assert found["a_rank_that_is_gone"] == ([] if rank == 1 else [expected] * 2)


def test_every_collective_gives_what_mpi_gives() -> None:
    done = run(2, "tests/mpi/against_mpi.py", "100", environment={"MPI_GPUCOMP_RAILS": IN_TURN})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == [] and found["compared"] > 2000


def test_messages_arrive_as_mpi_has_them() -> None:
    done = run(2, "-m", "mpi4py", "tests/mpi/point_to_point.py", environment={"MPI_GPUCOMP_RAILS": AT_ONCE})
    assert done.returncode == 0, done.stderr
    for rank, found in enumerate(json.loads(done.stdout)):
        assert found["too_long"][1].startswith(f"BufferError: rank {rank}: Recv from rank {1 - rank}, tag 4: ")
        assert found["wrong_type"][2].endswith("Convert them first: MPI's own types do not go over rails.")
        assert not any(value for name, value in found.items() if name not in ("too_long", "wrong_type", "failing"))
