"""Rails under mpirun, on two loopback addresses: everything that a communicator does, while paths break."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

import pytest
from launch import needs_mpirun, run

from mpi_gpucomp.transport.rails import discovery as devices

pytestmark = needs_mpirun

IN_TURN, AT_ONCE = "127.0.0.1,127.0.0.2", "127.0.0.1+127.0.0.2"
RANKS = 3
STILL = "a_peer_that_stands_still"
REMEDY = "See to the network or to the rank; this communicator cannot be used any more."


def told(rails: str, *cases: str, wire: str = "tcp") -> list[dict[str, Any]]:
    settings = {"MPI_GPUCOMP_RAIL_WIRE": wire}
    done = run(RANKS, "-m", "mpi4py", "tests/mpi/railed.py", rails, *cases, environment=settings)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])  # UCX says what it has to say before
    return found


@pytest.fixture
def ucx_rails() -> str:
    """Name a device twice: some versions of UCX do not reach the loopback device, and machines may have one other."""
    if importlib.util.find_spec("ucxx") is None:
        pytest.skip("no ucxx: pip install mpi_gpucomp[ucx]")
    found = [(name, address) for name, address in devices.addresses().items() if name != "lo"]
    if not found:
        pytest.skip("no network device besides the loopback")
    return ",".join(found[0])


@pytest.mark.parametrize("rails", [IN_TURN, AT_ONCE])
def test_every_byte_arrives_whatever_breaks(rails: str) -> None:
    cases = ("collectives_under_cuts", "messages_under_cuts", "both_ways_at_once", "no_copies")
    right = {**dict.fromkeys(cases[:3], 0), "no_copies": [0, 1]}
    assert told(rails, *cases) == [right] * RANKS


def test_every_byte_arrives_over_ucx_whatever_breaks(ucx_rails: str) -> None:
    cases = ("collectives_under_cuts", "messages_under_cuts", "both_ways_at_once", "no_copies")
    right = {**dict.fromkeys(cases[:3], 0), "no_copies": [0, 1]}
    assert told(ucx_rails, *cases, wire="ucx") == [right] * RANKS


def test_strangers_do_no_harm_to_ucx(ucx_rails: str) -> None:
    cases = ("strangers", "strangers_at_every_port", "settings_are_passed_on")
    for found in told(ucx_rails, *cases, wire="ucx"):
        assert found["strangers"] == ["0 left", "0 heard anything", "0 cuts"]
        assert found["strangers_at_every_port"] == [0, 0, 1]
        assert all(one[1:] == [True, True] for one in found["settings_are_passed_on"])


def test_a_peer_that_stands_still_is_not_given_up_over_ucx(ucx_rails: str) -> None:
    """Its kernel answers for it on the connection beside; UCX says nothing meanwhile."""
    for rank, (right, lost, _) in enumerate(one[STILL] for one in told(ucx_rails, STILL, wire="ucx")):
        assert right and (lost == [] or rank == 1)


def test_all_ranks_must_have_ucx_if_one_asks_for_it(ucx_rails: str) -> None:
    for rank, found in enumerate(told(ucx_rails, "unlike_wires", wire="ucx")):
        missing, first, second, unlike, unknown = found["unlike_wires"]
        assert re.fullmatch(
            rf"SpecError: rank {rank}: wire of rails: expected UCX on every rank, got rank 0: [\d.]+; "
            r"rank 1: No module named 'ucxx.*; rank 2: [\d.]+\. "
            r"Install ucxx there \(pip install mpi_gpucomp\[ucx\]\), or choose wire='tcp' or wire='auto'\.",
            missing,
        )
        assert first == second == "TcpWire"
        assert unlike == (
            f"SpecError: rank {rank}: wire of rails: expected the same on every rank, "
            "got rank 0: tcp; rank 1: auto; rank 2: tcp. Pass the same wire on every rank."
        )
        assert unknown == "SpecError: wire of rails: expected tcp, ucx or auto, got 'pigeon'. Choose one of them."


def test_records_name_the_rail() -> None:
    """Received and sent over the first rail, then over the second."""
    for found in told(IN_TURN, "records_name_the_rail"):
        assert found["records_name_the_rail"] == [[[0, 0], [1, 0]], [[0, 1], [1, 1]]]


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
        assert found["too_long"][1].startswith(f"BufferSpecError: rank {rank}: Recv from rank {1 - rank}, tag 4: ")
        assert found["wrong_type"][2].endswith("Convert them first: MPI's own types do not go over rails.")
        assert not any(value for name, value in found.items() if name not in ("too_long", "wrong_type", "failing"))
