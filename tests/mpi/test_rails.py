"""Rails under mpirun, on two loopback addresses, while paths break."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

import pytest
from launch import needs_mpirun, run

from mpi_gpucomp.transport.rails.discovery import addresses

pytestmark = needs_mpirun

FAILOVER, STRIPED = "127.0.0.1,127.0.0.2", "127.0.0.1+127.0.0.2"
ERRORS = ("too_long", "wrong_type", "failing")
RANKS = 3
REMEDY = "Check the network and that rank. This communicator cannot be used any more."


def results(rails: str, *cases: str, wire: str = "tcp") -> list[dict[str, Any]]:
    settings = {"MPI_GPUCOMP_RAIL_WIRE": wire}
    done = run(RANKS, "-m", "mpi4py", "tests/mpi/rail_cases.py", rails, *cases, environment=settings)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])  # after messages of UCX
    return found


@pytest.fixture
def ucx_rails() -> str:
    """Name one device twice: some versions of UCX do not support loopback, and hosts may have one other device."""
    if importlib.util.find_spec("ucxx") is None:
        pytest.skip("no ucxx: pip install mpi_gpucomp[ucx]")
    found = [(name, address) for name, address in addresses().items() if name != "lo"]
    if not found:
        pytest.skip("no network device besides the loopback")
    return ",".join(found[0])


@pytest.mark.parametrize("rails", [FAILOVER, STRIPED])
def test_every_byte_arrives_whatever_breaks(rails: str) -> None:
    cases = ("collectives_under_cuts", "messages_under_cuts", "all_paths_at_once")
    assert results(rails, *cases) == [dict.fromkeys(cases, 0)] * RANKS


def test_long_messages_are_not_copied() -> None:
    assert results(FAILOVER, "no_copies") == [{"no_copies": [0, 1]}] * RANKS


def test_every_byte_arrives_over_ucx_whatever_breaks(ucx_rails: str) -> None:
    cases = ("collectives_under_cuts", "messages_under_cuts", "all_paths_at_once", "no_copies")
    right = {**dict.fromkeys(cases[:3], 0), "no_copies": [0, 1]}
    assert results(ucx_rails, *cases, wire="ucx") == [right] * RANKS


def test_unauthenticated_peers_do_not_disturb_ucx(ucx_rails: str) -> None:
    cases = ("unauthenticated", "unauthenticated_at_every_port", "derived_communicators")
    for found in results(ucx_rails, *cases, wire="ucx"):
        assert found["unauthenticated"] == [0, 0, 0]
        assert found["unauthenticated_at_every_port"] == [0, 0, 1]
        assert all(one[1:] == [True, True] for one in found["derived_communicators"])


def test_a_hung_peer_stays_connected_over_ucx(ucx_rails: str) -> None:
    """Its kernel acknowledges on the side channel; UCX is silent meanwhile."""
    for rank, (right, lost, _) in enumerate(one["hung_peer"] for one in results(ucx_rails, "hung_peer", wire="ucx")):
        assert right and (lost == [] or rank == 1)


def test_ucx_must_be_installed_on_all_ranks(ucx_rails: str) -> None:
    for rank, found in enumerate(results(ucx_rails, "different_wires", wire="ucx")):
        missing, first, second, different, unknown = found["different_wires"]
        assert re.fullmatch(
            rf"SpecError: rank {rank}: wire of rails: expected UCX on every rank, got rank 0: [\d.]+; "
            r"rank 1: No module named 'ucxx.*; rank 2: [\d.]+\. "
            r"Install ucxx there \(pip install mpi_gpucomp\[ucx\]\), or set wire='tcp' or wire='auto'\.",
            missing,
        )
        assert first == second == "TcpBackend"
        assert different == (
            f"SpecError: rank {rank}: wire of rails: expected the same on every rank, "
            "got rank 0: tcp; rank 1: auto; rank 2: tcp. Pass the same wire on every rank."
        )
        assert unknown == "SpecError: wire of rails: expected tcp, ucx or auto, got 'pigeon'. Choose one of them."


def test_records_name_the_rail() -> None:
    """Received and sent over the first rail, then over the second."""
    for found in results(FAILOVER, "records_name_the_rail"):
        assert found["records_name_the_rail"] == [[[0, 0], [1, 0]], [[0, 1], [1, 1]]]


def test_unauthenticated_peers_are_rejected_and_settings_checked() -> None:
    for rank, found in enumerate(results(FAILOVER, "unauthenticated", "invalid_settings", "derived_communicators")):
        assert found["unauthenticated"] == [0, 0, 0]
        missing, different, twice, no_time = found["invalid_settings"]
        assert missing.startswith(
            f"SpecError: rank {rank}: rails: expected devices that every rank has, got rank 1: rails: expected network "
            "devices with an IP address, by name, address or network, got 'nosuch0'. This host has lo (127.0.0.1)"
        )
        assert missing.endswith(". Name devices that every host has, or networks, which match on all.")
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
        assert found["derived_communicators"] == totals


def test_a_hung_peer_stays_connected() -> None:
    """Its kernel still acknowledges; nothing is lost when it continues."""
    for rank, (right, lost, rails) in enumerate(one["hung_peer"] for one in results(FAILOVER, "hung_peer")):
        assert right and (lost == [] or rank == 1)  # the stopped rank sees its own pause as silence
        assert rails == ["127.0.0.1"] or lost


def test_a_dead_rank_is_an_error_on_all_others() -> None:
    done = run(RANKS, "tests/mpi/rail_cases.py", FAILOVER, "dead_rank")
    for rank, found in enumerate(json.loads(done.stdout.splitlines()[0])):
        expected = (
            rf"RankFailedError: rank {rank}: rails: expected all ranks reachable, "
            r"got no path from rank [02] to rank 1: "
            rf"its ports refuse connections\. {re.escape(REMEDY)}"
        )
        assert len(found["dead_rank"]) == (0 if rank == 1 else 2)
        assert all(re.fullmatch(expected, error) for error in found["dead_rank"])


def test_every_collective_matches_mpi() -> None:
    done = run(2, "tests/mpi/compare_native.py", "100", environment={"MPI_GPUCOMP_RAILS": FAILOVER})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == [] and found["compared"] > 1000


def test_messages_match_mpi() -> None:
    done = run(2, "-m", "mpi4py", "tests/mpi/point_to_point.py", environment={"MPI_GPUCOMP_RAILS": STRIPED})
    assert done.returncode == 0, done.stderr
    for rank, found in enumerate(json.loads(done.stdout)):
        assert found["too_long"][1].startswith(f"BufferSpecError: rank {rank}: Recv from rank {1 - rank}, tag 4: ")
        assert found["wrong_type"][2].endswith("Convert them first: rails carry basic types only.")
        assert not any(value for name, value in found.items() if name not in ERRORS)
