"""The backends of a rail: TCP sockets, or UCX over TCP or RDMA; and how the ranks agree on one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.transport.rails import ucx
from mpi_gpucomp.transport.rails.connector import AddressExchange, HandshakeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.transport.rails.connector import InitiatorHandshake, ResponderHandshake
    from mpi_gpucomp.transport.rails.discovery import Rail

    Authentication = InitiatorHandshake | ResponderHandshake
    Handshake = Authentication | AddressExchange

__all__ = [
    "AUTO",
    "RDMA",
    "TCP",
    "UCX",
    "Capabilities",
    "RailBackend",
    "UcxAddressExchange",
    "agree",
    "make_backend",
    "probe_capabilities",
]

TCP, UCX, AUTO = "tcp", "ucx", "auto"
"""Values of the setting: sockets, UCX, or UCX where every rank has RDMA."""
RDMA = "ucx over RDMA"
INSTALL = "pip install mpi_gpucomp[ucx]"


class Capabilities(NamedTuple):
    """What a rank requests and supports."""

    wire: str
    """The user's setting."""
    has_ucx: bool
    version: str
    """Of UCX, or why it is not available."""
    rdma: tuple[bool, ...]
    """For each rail, whether UCX can use an RDMA device."""
    fault: str | None = None


def probe_capabilities(wire: str, rails: Sequence[Rail]) -> Capabilities:
    """Return this rank's capabilities; UCX is loaded only if requested."""
    if wire == TCP:
        return Capabilities(wire, False, "not requested", (False,) * len(rails))
    has_ucx, version = ucx.version()
    rdma = tuple(has_ucx and _has_rdma(rail) for rail in rails)
    return Capabilities(wire, has_ucx, version, rdma, _fault(rails, rdma) if wire == UCX and has_ucx else None)


def _has_rdma(rail: Rail) -> bool:
    port = ucx.rdma_port(rail.device)
    try:
        return port is not None and ucx.context(port, "ib") is not None
    except ucx.UcxError:
        return False


def _fault(rails: Sequence[Rail], rdma: Sequence[bool]) -> str | None:
    """Return why UCX cannot use a rail, if it cannot."""
    for rail, has_rdma in zip(rails, rdma, strict=True):
        try:
            _ = has_rdma or ucx.context(rail.interface or rail.name, "tcp")
        except ucx.UcxError as error:
            return str(error)
    return None


def agree(ranks: Sequence[Capabilities], rank: int) -> list[str]:
    """Return the backend of each rail, the same on all ranks; all raise if they cannot agree."""
    wires = [one.wire for one in ranks]
    if len(set(wires)) > 1:
        raise _disagree("the same on every rank", wires, "Pass the same wire on every rank.", rank)
    same_ucx = all(one.has_ucx for one in ranks) and len({one.version for one in ranks}) == 1
    if wires[0] == UCX:
        _check(ranks, rank, same_ucx=same_ucx)
    if wires[0] == TCP or not same_ucx:
        return [TCP] * len(ranks[0].rdma)
    rest = UCX if wires[0] == UCX else TCP
    return [RDMA if all(having) else rest for having in zip(*(one.rdma for one in ranks), strict=True)]


def _check(ranks: Sequence[Capabilities], rank: int, *, same_ucx: bool) -> None:
    versions = [one.version for one in ranks]
    if not all(one.has_ucx for one in ranks):
        remedy = f"Install ucxx there ({INSTALL}), or set wire='tcp' or wire='auto'."
        raise _disagree("UCX on every rank", versions, remedy, rank)
    if not same_ucx:
        raise _disagree("the same UCX version on every rank", versions, "Install the same version everywhere.", rank)
    faults = [one.fault for one in ranks]
    if any(faults):
        remedy = "Name devices that UCX can use (see ucx_info -d), or set wire='tcp'."
        raise _disagree("devices that UCX can use", [fault or "ok" for fault in faults], remedy, rank)


def _disagree(expected: str, got: Sequence[str], remedy: str, rank: int) -> SpecError:
    listed = "; ".join(f"rank {number}: {one}" for number, one in enumerate(got))
    return SpecError("wire of rails", expected=expected, got=listed, remedy=remedy, rank=rank)


class RailBackend(Protocol):
    """Makes paths of authenticated connections."""

    def handshake(self, authentication: Authentication) -> Handshake:
        """Return the exchange that precedes a path, starting with the authentication."""
        ...


class TcpBackend:
    """TCP sockets."""

    def __init__(self, rail: Rail) -> None:
        """Serve one rail."""
        self._rail = rail

    def handshake(self, authentication: Authentication) -> Handshake:
        """Add nothing to the authentication."""
        return authentication


class UcxAddressExchange(AddressExchange):
    """A handshake followed by an exchange of UCX worker addresses."""

    def __init__(self, authentication: Authentication, devices: str, transports: str) -> None:
        """Make an endpoint on some devices once the peer is authenticated."""
        super().__init__(authentication, self._make_endpoint)
        self._where = devices, transports
        self._endpoint: ucx.UcxEndpoint | None = None

    def _make_endpoint(self) -> bytes:
        try:
            self._endpoint = ucx.UcxEndpoint(*self._where)
        except ucx.UcxError as error:
            raise HandshakeError(str(error)) from error
        return self._endpoint.address_blob

    def connect(self) -> ucx.UcxEndpoint:
        """Return the endpoint, connected to the peer's worker; raise HandshakeError if it cannot be."""
        assert self._endpoint is not None, "the handshake is done"
        try:
            self._endpoint.connect(self.peer_address)
        except ucx.UcxError as error:
            raise HandshakeError(str(error)) from error
        return self._endpoint


class UcxBackend:
    """UCX, on the device of a rail."""

    def __init__(self, rail: Rail, *, rdma: bool) -> None:
        """Serve one rail."""
        self._rail = rail
        port = ucx.rdma_port(rail.device) if rdma else None
        self._where = (port, "ib") if port is not None else (rail.interface or rail.name, "tcp")

    def handshake(self, authentication: Authentication) -> Handshake:
        """Exchange UCX addresses after the authentication."""
        return UcxAddressExchange(authentication, *self._where)


def make_backend(kind: str, rail: Rail) -> RailBackend:
    """Return the backend of a rail."""
    return TcpBackend(rail) if kind == TCP else UcxBackend(rail, rdma=kind == RDMA)
