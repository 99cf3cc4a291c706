"""A cluster that is up: where ranks run, what their traffic crosses, and what becomes of links that are cut."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import sleep

import pytest
from cluster_machine import RANKS, STREAM, WIRE, new_name, own_network, sent_bytes, skip_unless_possible, until

from mpi_gpucomp.errors import SpecError
from osu_bench.cluster import Cluster, ClusterError, Link
from osu_bench.cluster.processes import within
from osu_bench.cluster.system import call

MESSAGE = 4_000_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    skip_unless_possible()
    with Cluster.up(3, "1gbit", 2, name=new_name()) as made:
        yield made


@pytest.fixture(params=["openmpi", "mpich"])
def prefix(request: pytest.FixtureRequest) -> Path | None:
    return request.getfixturevalue("mpich") if request.param == "mpich" else None


def places(done: subprocess.CompletedProcess[str]) -> list[list[object]]:
    assert done.returncode == 0, done.stderr
    found: list[list[object]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_rank_i_is_on_host_i_and_knows_its_network(
    cluster: Cluster, prefix: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"MPI_GPUCOMP_TEST": "a b", "OMPI_MCA_test": "2", "MPIR_CVAR_TEST": "3", "PYTHONPATH": "/nowhere"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    done = cluster.run([*RANKS, "1"], mpich=prefix, timeout=60, capture=True, environment={"OSU_BENCH_TEST": "5"})
    for rank, (number, name, library, variables) in enumerate(places(done)):
        assert (number, name) == (rank, f"h{rank}")
        assert library == "Open" if prefix is None else library.startswith("MPICH")
        assert given.items() <= variables.items()
        assert (variables["OSU_BENCH_TEST"], variables["GLOO_SOCKET_IFNAME"]) == ("5", "eth0")
        assert json.loads(variables["OSU_BENCH_NETWORK"]) == {"hosts": 3, "rate": 1e9, "rails": 2}


def test_messages_cross_the_first_rail_alone(cluster: Cluster, prefix: Path | None) -> None:
    interfaces = ("eth0", "eth1", "mgmt")
    before = [sent_bytes(cluster, 0, interface) for interface in interfaces]
    found = places(cluster.run([*RANKS, str(MESSAGE)], mpich=prefix, ranks=2, timeout=60, capture=True))
    assert len(found) == 2
    rail0, rail1, management = (
        sent_bytes(cluster, 0, name) - sent for name, sent in zip(interfaces, before, strict=True)
    )
    assert MESSAGE < rail0 < 1.2 * MESSAGE
    assert rail1 < 10_000 and management < MESSAGE / 8


@pytest.mark.parametrize("wire", ["auto", "mpi"])
def test_ports_are_opened_on_the_network_of_mpi_alone(cluster: Cluster, wire: str) -> None:
    before = sent_bytes(cluster, 0, "eth1")
    environment = {"MPI_GPUCOMP_WIRE": wire}
    done = cluster.run([*WIRE, "2000000"], timeout=60, capture=True, environment=environment)
    why = f"tcp: MPI would use TCP on {cluster.plan.network(0)}" if wire == "auto" else "mpi: the setting is mpi"
    for host, (stats, addresses, explained) in enumerate(places(done)):
        assert addresses == ([cluster.plan.address(host, 0)] if wire == "auto" else [])
        assert stats == why and explained.startswith(f"route: engine over {why}\n")
    assert sent_bytes(cluster, 0, "eth1") - before < 10_000


def test_the_exit_code_is_passed_on(cluster: Cluster, prefix: Path | None) -> None:
    assert cluster.run([*RANKS, "fail"], mpich=prefix, timeout=60, capture=True).returncode == 7


def test_more_ranks_than_hosts_are_refused(cluster: Cluster) -> None:
    with pytest.raises(SpecError) as error:
        cluster.run(RANKS, ranks=4)
    assert str(error.value) == (
        "ranks on the cluster: expected 1 to 3, got 4. "
        "Each host runs one rank: make a larger cluster with `osu_bench cluster up --hosts N`."
    )


def test_a_program_that_is_ended_leaves_no_process(cluster: Cluster, prefix: Path | None) -> None:
    with cluster.start([*RANKS, "wait"], mpich=prefix, capture=True) as running:
        assert running.process.stdout is not None and running.process.stdout.readline() == "there\n"
        assert running.poll() is None and len(running.processes()) > 3
    assert running.poll() not in (None, 0)
    assert within(cluster.plan.namespaces) == []


def test_a_program_that_takes_too_long_is_ended(cluster: Cluster) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.run([*RANKS, "wait"], timeout=2, capture=True)
    assert within(cluster.plan.namespaces) == []


def test_ranks_that_ignore_their_end_are_ended(cluster: Cluster) -> None:
    deaf = cluster.start(["bash", "-c", "trap '' TERM INT; echo there; while :; do sleep 1; done"], capture=True)
    assert deaf.process.stdout is not None and deaf.process.stdout.readline() == "there\n"
    deaf.process.send_signal(signal.SIGKILL)  # whatever the launcher would have done for them
    deaf.end(grace=0.2)
    assert within(cluster.plan.namespaces) == []


def shaped(cluster: Cluster, namespace: str, interface: str) -> str:
    return call("tc", "qdisc", "show", "dev", interface, within=namespace)


def test_a_new_rate_holds_at_both_ends(cluster: Cluster) -> None:
    ends = ((cluster.plan.switch, "h1r1"), (cluster.plan.namespace(1), "eth1"))
    others = ((cluster.plan.switch, "h1r0"), (cluster.plan.namespace(2), "eth1"))
    cluster.set_rate("500mbit", host=1, rail=1)
    assert all("tbf" in shaped(cluster, *end) and "rate 500Mbit" in shaped(cluster, *end) for end in ends)
    assert all("rate 1Gbit" in shaped(cluster, *end) for end in others)
    cluster.set_rate(None, host=1)
    assert not any("tbf" in shaped(cluster, *end) for end in (*ends, others[0]))
    assert [link.rate for link in cluster.status()] == [1e9, 1e9, None, None, 1e9, 1e9]
    cluster.set_rate(20e9)
    assert {link.rate for link in cluster.status()} == {20e9}
    assert all("rate 20Gbit" in shaped(cluster, *end) for end in (*ends, *others))
    cluster.set_rate("1gbit")


def test_the_management_network_is_never_shaped(cluster: Cluster) -> None:
    assert "tbf" not in shaped(cluster, cluster.plan.switch, "h0m")
    assert "tbf" not in shaped(cluster, cluster.plan.namespace(0), "mgmt")


def test_routes_use_a_congestion_control_that_does_not_pace(cluster: Cluster) -> None:
    for rail in range(2):
        route = call("ip", "-n", cluster.plan.namespace(2), "route", "show", f"10.78.{rail}.0/24")
        assert f"dev eth{rail}" in route and "congctl cubic" in route


@pytest.fixture
def stream(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """Return a file with the count of bytes that have come from host 0 to host 1 on rail 1."""
    file = tmp_path / "count"
    address = [cluster.plan.address(1, 1), "5000"]
    with subprocess.Popen([*cluster.inside(1), *STREAM, "receive", *address, str(file)]) as receiver:
        until(file.exists)
        with subprocess.Popen([*cluster.inside(0), *STREAM, "send", *address]) as sender:
            until(lambda: int(file.read_text()) > 100_000)
            yield file
            sender.kill()
        receiver.kill()
    cluster.heal()


def stands_still(file: Path) -> bool:
    before = file.read_text()
    sleep(0.5)
    return file.read_text() == before


@pytest.mark.parametrize(("host", "how"), [(0, "down"), (1, "down"), (0, "silent"), (1, 100)])
def test_a_stream_stalls_while_a_link_is_cut_and_goes_on(
    cluster: Cluster, stream: Path, host: int, how: str | float
) -> None:
    cluster.cut(host, 1, how)
    until(lambda: stands_still(stream))
    cut = [(link.host, link.rail, link.state) for link in cluster.status() if link.state != "up"]
    assert cut == [(host, 1, "silent" if how == 100 else how)]
    before = int(stream.read_text())
    cluster.heal(host, 1)
    until(lambda: int(stream.read_text()) > before + 100_000)
    assert {link.state for link in cluster.status()} == {"up"}


def test_a_cut_of_another_rail_does_not_matter(cluster: Cluster, stream: Path) -> None:
    cluster.cut(0, 0)
    before = int(stream.read_text())
    until(lambda: int(stream.read_text()) > before + 100_000)


def test_a_link_that_loses_a_share_loses_it_both_ways(cluster: Cluster) -> None:
    cluster.cut(2, 1, how=12.5)
    assert cluster.status()[5] == Link(2, 1, "10.78.1.3", 1e9, "loss 12.5 %")
    for namespace in (cluster.plan.switch, cluster.plan.namespace(2)):
        assert "numgen random mod 10000 < 1250 drop" in call("nft", "list", "ruleset", within=namespace)
    cluster.cut(2, 1, how="down")
    assert cluster.status()[5].state == "down"
    cluster.heal(2)
    assert cluster.status()[5].state == "up"
    assert call("nft", "list", "ruleset", within=cluster.plan.namespace(2)) == ""


@pytest.mark.parametrize("how", ["gone", 0, 100.1, float("nan")])
def test_other_cuts_are_refused(cluster: Cluster, how: str | float) -> None:
    with pytest.raises(SpecError) as error:
        cluster.cut(0, 0, how)
    assert str(error.value) == (
        "cut of a link: expected down, silent, or a percentage of packets to drop, from 0.01 to 100, "
        f"got {how!r}. Choose one of these."
    )
    assert cluster.status()[0].state == "up"


def test_hosts_and_rails_that_are_not_there_are_refused(cluster: Cluster) -> None:
    with pytest.raises(SpecError) as error:
        cluster.cut(3)
    assert str(error.value) == ("host of the cluster: expected 0 to 2, got 3. See `osu_bench cluster status`.")
    with pytest.raises(SpecError) as error:
        cluster.set_rate("1gbit", 0, 2)
    assert str(error.value) == "rail of the cluster: expected 0 to 1, got 2. See `osu_bench cluster status`."
    with pytest.raises(SpecError, match="host of the cluster"):
        cluster.inside(-1)


def test_what_the_kernel_refuses_is_told(cluster: Cluster) -> None:
    with pytest.raises(ClusterError) as error:
        call("ip", "link", "show", "dev", "eth9", within=cluster.plan.namespace(0))
    assert str(error.value) == (
        f"`ip link show dev eth9` in {cluster.plan.name}-h0: expected success, "
        'got Device "eth9" does not exist. '
        "The kernel needs veth, bridge, tbf and nftables; `osu_bench cluster down` removes partial clusters."
    )


def test_the_network_of_the_machine_stays_as_it_is() -> None:
    skip_unless_possible()
    before = own_network()
    with (
        subprocess.Popen(["ip", "monitor", "link", "address", "route"], stdout=subprocess.PIPE, text=True) as monitor,
        Cluster.up(2, "1gbit", 2, name=new_name()) as cluster,
    ):
        assert own_network() == before
        cluster.cut(0, how="silent")
        cluster.cut(1)
        cluster.down()
        monitor.terminate()
        assert monitor.stdout is not None and monitor.stdout.read() == ""
    assert own_network() == before
