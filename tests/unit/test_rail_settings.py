"""What users say of rails, and which devices that means here."""

from __future__ import annotations

import socket

import pytest

from mpi_gpucomp import config
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.transport.rails import Rails, chosen
from mpi_gpucomp.transport.rails.discovery import Rail, find, listen

DEVICES, TIMEOUT, LIMIT, WIRE = (
    setting.variable for setting in (config.RAILS, config.RAIL_TIMEOUT, config.RAIL_LIMIT, config.RAIL_WIRE)
)


def test_tiers() -> None:
    assert Rails("eth0,eth1").tiers == [["eth0"], ["eth1"]]
    assert Rails("eth0+eth1, mgmt").tiers == [["eth0", "eth1"], ["mgmt"]]


def test_what_the_caller_says_counts_more_than_the_environment() -> None:
    given = {DEVICES: "lo", TIMEOUT: "0.25", LIMIT: "7", WIRE: "auto"}
    assert chosen(None, {}) is None
    assert chosen("", given) is None
    assert chosen(None, given) == Rails("lo", 0.25, 7.0, "auto")
    assert chosen("eth0,eth1", given) == Rails("eth0,eth1", 0.25, 7.0, "auto")
    assert chosen(Rails("eth1"), given) == Rails("eth1", 1.0, 30.0, "tcp")
    assert chosen("lo", {}) == Rails("lo", 1.0, 30.0, "tcp")


def test_a_wire_that_cannot_be() -> None:
    with pytest.raises(SpecError) as error:
        chosen("lo", {WIRE: "UCX"})
    expected = "expected tcp, ucx or auto, got 'UCX'. Choose one of them."
    assert str(error.value) == f"environment variable {WIRE}: {expected}"
    with pytest.raises(SpecError) as error:
        chosen(Rails("lo", wire="UCX"))
    assert str(error.value) == f"wire of rails: {expected}"


@pytest.mark.parametrize("said", [",", "eth0,", "eth0++eth1", "eth0,eth0", "eth0+eth0"])
def test_devices_that_cannot_be(said: str) -> None:
    with pytest.raises(SpecError) as error:
        chosen(said, {})
    assert str(error.value) == (
        f"rails: expected devices that differ, such as eth0,eth1 or eth0+eth1, got '{said}'. Name each device once."
    )


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_cannot_be(seconds: float) -> None:
    with pytest.raises(SpecError, match=r"^limit of rails: expected seconds, more than 0, got "):
        chosen(Rails("lo", limit=seconds), {})


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(SpecError) as error:
        chosen("lo", {TIMEOUT: "soon"})
    assert str(error.value) == (
        f"environment variable {TIMEOUT}: expected a number of seconds above 0, got 'soon'. Change or unset it."
    )


def test_a_device_is_found_by_name_address_and_network() -> None:
    assert find("lo", 0) == Rail("lo", "127.0.0.1", "lo")
    assert find("127.0.0.1", 0) == Rail("127.0.0.1", "127.0.0.1", "lo")
    assert find("127.0.0.0/8", 0) == Rail("127.0.0.0/8", "127.0.0.1", "lo")
    assert find("127.0.0.2", 0) == Rail("127.0.0.2", "127.0.0.2", None)
    assert find("lo", 0).link == find("127.0.0.2", 0).link == "lo"
    assert find("lo", 0).has_carrier() and find("127.0.0.2", 0).has_carrier()
    assert not Rail("none", "127.0.0.1", "nosuch0").has_carrier()


@pytest.mark.parametrize("name", ["nosuch0", "203.0.113.7", "203.0.113.0/24", "", "::1"])
def test_a_device_that_is_not_there_is_named_with_those_that_are(name: str) -> None:
    with pytest.raises(SpecError) as error:
        find(name, 3)
    assert str(error.value).startswith(
        "rank 3: rails: expected network devices with an IPv4 address, by name, address or network, "
        f"got '{name}'. This machine has lo (127.0.0.1)"
    )


def test_sockets_take_their_rail() -> None:
    with listen(find("lo", 0)) as listener, find("lo", 0).socket() as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0") == b"lo"
        made.bind(("127.0.0.1", 0))
        made.connect(listener.getsockname())
