"""A cluster with racks: hosts of one reach each other by their switch, those of others by the uplinks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_machine import STREAM, new_name, skip_unless_possible, until

from mpi_gpucomp.errors import SpecError
from osu_bench.cluster import Cluster
from osu_bench.cluster.plan import Plan
from osu_bench.cluster.system import call
from osu_bench.command import main

ENOUGH = 200_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    skip_unless_possible()
    with Cluster.up(3, "1gbit", 2, racks=2, uplink="200mbit", name=new_name()) as made:
        yield made


def passed(cluster: Cluster, interface: str) -> int:
    shown = call("ip", "-j", "-s", "-n", cluster.plan.switch, "link", "show", "dev", interface)
    count: int = json.loads(shown)[0]["stats64"]["tx"]["bytes"]
    return count


def stream(cluster: Cluster, sender: int, receiver: int, file: Path) -> None:
    """Send some bytes from one host to another on rail 0."""
    address = [cluster.plan.address(receiver, 0), "5000"]
    with subprocess.Popen([*cluster.inside(receiver), *STREAM, "receive", *address, str(file)]) as at_receiver:
        until(file.exists)
        with subprocess.Popen([*cluster.inside(sender), *STREAM, "send", *address]) as at_sender:
            until(lambda: int(file.read_text() or 0) > ENOUGH)
            at_sender.kill()
        at_receiver.kill()


def test_hosts_are_dealt_out_in_turn() -> None:
    plan = Plan("some", 5, racks=2)
    assert [plan.rack(host) for host in range(5)] == [0, 1, 0, 1, 0]
    assert Plan("some", 5, 2).uplinks() == []


def test_more_racks_than_hosts_are_refused() -> None:
    with pytest.raises(SpecError) as error:
        Cluster.up(2, racks=3)
    assert str(error.value) == "racks of a cluster: expected 1 to 2, got 3. Choose a number in that range."


@pytest.mark.parametrize(("receiver", "crosses"), [(2, False), (1, True)])
def test_only_what_leaves_a_rack_goes_through_its_uplink(
    cluster: Cluster, tmp_path: Path, receiver: int, crosses: bool
) -> None:
    ends = ("k0r0", "c1r0")  # out of rack 0, into rack 1
    before = [passed(cluster, end) for end in ends]
    stream(cluster, 0, receiver, tmp_path / "count")
    sent = [passed(cluster, end) - earlier for end, earlier in zip(ends, before, strict=True)]
    assert all((count > ENOUGH) == crosses for count in sent)
    assert passed(cluster, "k0r1") < ENOUGH  # the other rail


def test_uplinks_are_shaped_at_both_ends(cluster: Cluster) -> None:
    assert cluster.uplinks() == {(rack, rail): 200e6 for rack in range(2) for rail in range(2)}
    cluster.set_uplink("100mbit")
    for rack in range(2):
        for end in cluster.plan.uplink(rack, 1):
            assert "rate 100Mbit" in call("tc", "qdisc", "show", "dev", end, within=cluster.plan.switch)
    assert {link.rate for link in cluster.status()} == {1e9}
    cluster.set_uplink(None)
    assert set(cluster.uplinks().values()) == {None}


def test_the_command_shows_and_changes_them(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "rate", "50mbit", "--uplink", "--name", cluster.plan.name]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "rack 0 (h0 h2), rail 0: uplink 50mbit",
        "rack 0 (h0 h2), rail 1: uplink 50mbit",
        "rack 1 (h1), rail 0: uplink 50mbit",
        "rack 1 (h1), rail 1: uplink 50mbit",
    ]


def test_one_switch_has_no_uplinks() -> None:
    with pytest.raises(SpecError) as error:
        Cluster(Plan("flat", 2), "").set_uplink("1gbit")
    assert str(error.value) == (
        "cluster flat: expected racks with uplinks, got one switch. "
        "Make one with racks: osu_bench cluster up --racks 2."
    )
