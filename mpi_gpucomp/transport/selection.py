"""Which wire carries the messages between hosts: MPI, or our own sockets.

Sockets that sleep in the kernel, and forward bytes as they arrive, beat an MPI library that polls TCP. Where MPI has
RDMA, or takes GPU memory, it stays the wire. Ports are opened only on a network that MPI uses and that all ranks share.
All ranks exchange what they know, and select alike.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.transport.gpu_aware import cuda_aware
from mpi_gpucomp.transport.rails.discovery import networks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mpi_gpucomp.transport.bootstrap import Bootstrap

__all__ = ["AUTO", "MPI_WIRE", "TCP_WIRE", "HostFacts", "WireSelection", "rdma_device", "select", "select_wire"]

AUTO, MPI_WIRE, TCP_WIRE = "auto", "mpi", "tcp"
LOOPBACK = "lo"
VIRTUAL = ("lo", "docker", "br-", "virbr", "veth", "cni", "flannel", "tun", "tap")
"""Devices that other hosts are not reached by."""
HINTS = ("OMPI_MCA_btl_tcp_if_include", "FI_TCP_IFACE", "UCX_NET_DEVICES")
"""Variables that name the devices or networks that an MPI library uses over TCP."""


class WireSelection(NamedTuple):
    """The wire, and why."""

    kind: str
    """mpi or tcp."""
    why: str
    network: str = ""
    """The network, or on one host the device, that tcp uses."""


class HostFacts(NamedTuple):
    """What a rank knows of its host."""

    networks: dict[str, str]
    """Networks that MPI uses, and the device of each."""
    rdma: str | None
    """A device with RDMA."""
    cuda_aware: bool

    @classmethod
    def of_this_host(cls, *, cuda_aware: bool) -> HostFacts:
        """Return the facts of this process."""
        return cls(used_networks(networks()), rdma_device(), cuda_aware)


def rdma_device(sys: Path = Path("/sys/class")) -> str | None:
    """Return a network device with RDMA that is in use, if this host has one."""
    for state in sorted(sys.glob("infiniband/*/ports/*/state")):
        if "ACTIVE" in state.read_text():
            return state.parts[-4]
    return next((path.name for name in ("cxi", "hfi1") for path in sorted(sys.glob(f"{name}/*"))), None)


def used_networks(found: Mapping[str, str], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return those of the networks (by network: device) that MPI uses: what its variables say, or all physical ones."""
    given = os.environ if environment is None else environment
    hints = [name.strip() for variable in HINTS for name in given.get(variable, "").split(",") if name.strip()]
    known = {network: device for network, device in found.items() if {network, device} & set(hints)}
    if known:
        return known
    return {network: device for network, device in found.items() if not device.startswith(VIRTUAL)}


def select(facts: Sequence[HostFacts], hosts: int, wanted: str) -> WireSelection:
    """Select the wire of all ranks from the facts of each; `wanted` is auto, mpi or tcp."""
    if wanted == MPI_WIRE:
        return WireSelection(MPI_WIRE, "the setting is mpi")
    if hosts == 1:
        if wanted == TCP_WIRE:
            return WireSelection(TCP_WIRE, "the setting is tcp", LOOPBACK)
        return WireSelection(MPI_WIRE, "all ranks are on one host")
    shared = _first_shared(one.networks for one in facts)
    if wanted == TCP_WIRE:
        if shared is None:
            raise SpecError(
                "wire",
                expected="a network that all ranks share, for tcp",
                got="; ".join(f"rank {rank}: {', '.join(one.networks) or 'none'}" for rank, one in enumerate(facts)),
                remedy="Name the devices with rails=, or set wire to mpi.",
            )
        return WireSelection(TCP_WIRE, "the setting is tcp", shared)
    for rank, one in enumerate(facts):
        if one.rdma is not None:
            return WireSelection(MPI_WIRE, f"rank {rank} has RDMA ({one.rdma}), which MPI uses")
        if one.cuda_aware:
            return WireSelection(MPI_WIRE, f"MPI takes GPU memory on rank {rank}")
    if shared is None:
        return WireSelection(MPI_WIRE, "the ranks share no network")
    return WireSelection(TCP_WIRE, f"MPI would use TCP on {shared}", shared)


def _first_shared(of_ranks: Iterable[Mapping[str, str]]) -> str | None:
    first, *others = of_ranks
    return next((network for network in first if all(network in other for other in others)), None)


def select_wire(bootstrap: Bootstrap, hosts: int, wanted: str) -> WireSelection:
    """Select the wire of all ranks: collective."""
    if hosts == 1 or wanted == MPI_WIRE:
        return select((), hosts, wanted)
    own = HostFacts.of_this_host(cuda_aware=cuda_aware().aware)
    texts = bootstrap.allgather(json.dumps(own).encode())
    return select([_parse(text, rank) for rank, text in enumerate(texts)], hosts, wanted)


def _parse(text: bytes, rank: int) -> HostFacts:
    """Read a rank's facts, which are not trusted."""
    try:
        known, rdma, aware = json.loads(text)
        if not (isinstance(known, dict) and isinstance(rdma, (str, type(None))) and isinstance(aware, bool)):
            raise ValueError("fields of other types")
        return HostFacts({str(network): str(device) for network, device in known.items()}, rdma, aware)
    except (ValueError, RecursionError) as error:
        raise _invalid(rank, error) from error


def _invalid(rank: int, error: Any) -> SpecError:
    return SpecError(
        f"networks of rank {rank}",
        expected="the networks that it uses",
        got=str(error),
        remedy="Install the same version of mpi_gpucomp on every rank.",
    )
