"""Which wire is selected between hosts, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.transport.selection import HostFacts, WireSelection, rdma_device, select, used_networks

LAN, DATA = "10.0.0.0/24", "10.1.0.0/16"
PLAIN = HostFacts({LAN: "eth0", DATA: "eth1"}, None, False)
OTHER, RDMA = PLAIN._replace(networks={DATA: "ib0"}), PLAIN._replace(rdma="mlx5_0")


@pytest.mark.parametrize(
    ("facts", "hosts", "wanted", "selected"),
    [
        ([PLAIN, PLAIN], 2, "auto", WireSelection("tcp", f"MPI would use TCP on {LAN}", LAN)),
        (
            [PLAIN, PLAIN._replace(networks={DATA: "ib0"})],
            2,
            "auto",
            WireSelection("tcp", f"MPI would use TCP on {DATA}", DATA),
        ),
        ([PLAIN, PLAIN], 2, "mpi", WireSelection("mpi", "the setting is mpi")),
        ([PLAIN, PLAIN], 1, "auto", WireSelection("mpi", "all ranks are on one host")),
        ([PLAIN, PLAIN], 1, "tcp", WireSelection("tcp", "the setting is tcp", "lo")),
        (
            [PLAIN, PLAIN._replace(rdma="mlx5_0")],
            2,
            "auto",
            WireSelection("mpi", "rank 1 has RDMA (mlx5_0), which MPI uses"),
        ),
        ([PLAIN, PLAIN._replace(rdma="mlx5_0")], 2, "tcp", WireSelection("tcp", "the setting is tcp", LAN)),
        ([PLAIN._replace(cuda_aware=True), PLAIN], 2, "auto", WireSelection("mpi", "MPI takes GPU memory on rank 0")),
        ([PLAIN, PLAIN._replace(networks={})], 2, "auto", WireSelection("mpi", "the ranks share no network")),
    ],
)
def test_selection(facts: list[HostFacts], hosts: int, wanted: str, selected: WireSelection) -> None:
    assert select(facts, hosts, wanted) == selected


def test_tcp_needs_a_shared_network() -> None:
    with pytest.raises(SpecError) as caught:
        select([PLAIN, PLAIN._replace(networks={})], 2, "tcp")
    assert str(caught.value) == (
        f"wire: expected a network that all ranks share, for tcp, got rank 0: {LAN}, {DATA}; rank 1: none. "
        "Name the devices with rails=, or set wire to mpi."
    )


@pytest.mark.parametrize(
    ("environment", "used"),
    [
        ({}, {LAN: "eth0", DATA: "eth1"}),
        ({"OMPI_MCA_btl_tcp_if_include": DATA}, {DATA: "eth1"}),
        ({"FI_TCP_IFACE": "eth0"}, {LAN: "eth0"}),
        ({"UCX_NET_DEVICES": "mlx5_0:1"}, {LAN: "eth0", DATA: "eth1"}),
        ({"OMPI_MCA_btl_tcp_if_include": "lo"}, {"127.0.0.0/8": "lo"}),
    ],
)
def test_networks_that_mpi_uses(environment: dict[str, str], used: dict[str, str]) -> None:
    found = {"127.0.0.0/8": "lo", LAN: "eth0", "172.17.0.0/16": "docker0", DATA: "eth1"}
    assert used_networks(found, environment) == used


def test_rdma_devices_that_are_in_use(tmp_path: Path) -> None:
    assert rdma_device(tmp_path) is None
    port = tmp_path / "infiniband" / "mlx5_1" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    assert rdma_device(tmp_path) is None
    (port / "state").write_text("4: ACTIVE\n")
    assert rdma_device(tmp_path) == "mlx5_1"
