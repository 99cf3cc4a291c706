"""Settings of rails, and the devices they select."""

from __future__ import annotations

import json
import socket

import pytest

from mpi_gpucomp import config
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.transport.rails import Rails, resolve_rails
from mpi_gpucomp.transport.rails.backends import Capabilities
from mpi_gpucomp.transport.rails.discovery import Rail, _check, _ipv6_addresses, _RankInfo, find_rail, listen

DEVICES, TIMEOUT, LIMIT, WIRE = (
    setting.variable for setting in (config.RAILS, config.RAIL_TIMEOUT, config.RAIL_LIMIT, config.RAIL_WIRE)
)


def test_tiers() -> None:
    assert Rails("eth0,eth1").tiers == [["eth0"], ["eth1"]]
    assert Rails("eth0+eth1, mgmt").tiers == [["eth0", "eth1"], ["mgmt"]]


def test_arguments_take_precedence_over_the_environment() -> None:
    given = {DEVICES: "lo", TIMEOUT: "0.25", LIMIT: "7", WIRE: "auto"}
    assert resolve_rails(None, {}) is None
    assert resolve_rails("", given) is None
    assert resolve_rails(None, given) == Rails("lo", 0.25, 7.0, "auto")
    assert resolve_rails("eth0,eth1", given) == Rails("eth0,eth1", 0.25, 7.0, "auto")
    assert resolve_rails(Rails("eth1"), given) == Rails("eth1", 1.0, 30.0, "tcp")
    assert resolve_rails("lo", {}) == Rails("lo", 1.0, 30.0, "tcp", stripes=1)


def test_an_unknown_wire_is_an_error() -> None:
    with pytest.raises(SpecError) as error:
        resolve_rails("lo", {WIRE: "UCX"})
    expected = "expected tcp, ucx or auto, got 'UCX'. Choose one of them."
    assert str(error.value) == f"environment variable {WIRE}: {expected}"
    with pytest.raises(SpecError) as error:
        resolve_rails(Rails("lo", wire="UCX"))
    assert str(error.value) == f"wire of rails: {expected}"


@pytest.mark.parametrize("devices", [",", "eth0,", "eth0++eth1", "eth0,eth0", "eth0+eth0"])
def test_invalid_devices_are_an_error(devices: str) -> None:
    with pytest.raises(SpecError) as error:
        resolve_rails(devices, {})
    assert str(error.value) == (
        f"rails: expected devices that differ, such as eth0,eth1 or eth0+eth1, got '{devices}'. Name each device once."
    )


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_times_are_an_error(seconds: float) -> None:
    with pytest.raises(SpecError, match=r"^limit of rails: expected seconds, more than 0, got "):
        resolve_rails(Rails("lo", limit=seconds), {})


@pytest.mark.parametrize("stripes", [0, -1, 17])
def test_an_invalid_number_of_sockets_is_an_error(stripes: int) -> None:
    with pytest.raises(SpecError) as error:
        resolve_rails(Rails("lo", stripes=stripes))
    assert str(error.value) == f"stripes of rails: expected 1 to 16 sockets, got {stripes}. Give a number."


def test_an_invalid_variable_is_named() -> None:
    with pytest.raises(SpecError) as error:
        resolve_rails("lo", {TIMEOUT: "soon"})
    assert str(error.value) == (
        f"environment variable {TIMEOUT}: expected a number of seconds above 0, got 'soon'. Change or unset it."
    )


def test_devices_by_name_address_and_network() -> None:
    assert find_rail("lo", 0) == Rail("lo", "127.0.0.1", "lo")
    assert find_rail("127.0.0.1", 0) == Rail("127.0.0.1", "127.0.0.1", "lo")
    assert find_rail("127.0.0.0/8", 0) == Rail("127.0.0.0/8", "127.0.0.1", "lo")
    assert find_rail("127.0.0.2", 0) == Rail("127.0.0.2", "127.0.0.2", None)
    assert find_rail("lo", 0).interface == find_rail("127.0.0.2", 0).interface == "lo"
    assert find_rail("lo", 0).has_carrier() and find_rail("127.0.0.2", 0).has_carrier()
    assert not Rail("none", "127.0.0.1", "nosuch0").has_carrier()


@pytest.mark.parametrize("name", ["nosuch0", "203.0.113.7", "203.0.113.0/24", "", "2001:db8::1"])
def test_a_missing_device_is_named_with_the_existing_ones(name: str) -> None:
    with pytest.raises(SpecError) as error:
        find_rail(name, 3)
    assert str(error.value).startswith(
        "rank 3: rails: expected network devices with an IP address, by name, address or network, "
        f"got '{name}'. This host has lo (127.0.0.1)"
    )


@pytest.mark.skipif("::1" not in {address for _, address in _ipv6_addresses()}, reason="no IPv6")
def test_devices_by_ipv6_address_and_network() -> None:
    assert find_rail("::1", 0) == find_rail("::1/128", 0)._replace(name="::1") == Rail("::1", "::1", "lo")
    assert find_rail("::1", 0).interface == "lo" and find_rail("lo", 0).address == "127.0.0.1"
    with listen(find_rail("::1", 0)) as listener, find_rail("::1", 0).socket() as made:
        made.connect(listener.getsockname()[:2])


def test_ranks_must_agree_on_addresses_and_sockets() -> None:
    own = _RankInfo([("127.0.0.1", 80)], [[0]], Capabilities("tcp", False, "not requested", (False,)), None, 1)
    with pytest.raises(SpecError) as error:
        _check([own, own._replace(addresses=[("::1", 80)])], 0)
    assert str(error.value) == (
        "rank 0: rails: expected addresses of the same family on every rank, got rank 0: AF_INET; rank 1: AF_INET6. "
        "Name devices by network, such as 10.1.0.0/16 or fd00::/64."
    )
    with pytest.raises(SpecError) as error:
        _check([own, own._replace(stripes=2)], 0)
    assert str(error.value) == (
        "rank 0: stripes of rails: expected the same on every rank, got rank 0: 1; rank 1: 2. "
        "Pass the same stripes on every rank."
    )


def test_sockets_are_bound_to_their_device() -> None:
    with listen(find_rail("lo", 0)) as listener, find_rail("lo", 0).socket() as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0") == b"lo"
        made.bind(("127.0.0.1", 0))
        made.connect(listener.getsockname())


def test_published_settings_are_validated() -> None:
    own = _RankInfo([("127.0.0.1", 80)], [[0]], Capabilities("tcp", False, "not requested", (False,)), "no device", 1)
    assert _RankInfo.parse(json.dumps(own), 1, 0) == own
    for text in ("", "[]", "{}", '[[["a", "b"]], [], ["tcp", 0, "", [], null], null, 1]', "[[], [[{}]], [1, 2], null]"):
        with pytest.raises(SpecError) as error:
            _RankInfo.parse(text, 1, 0)
        assert str(error.value) == (
            f"rank 0: rails of rank 1: expected addresses, tiers and capabilities, got {text!r}. "
            "Install the same version of mpi_gpucomp on every rank."
        )
