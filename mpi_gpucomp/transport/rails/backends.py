"""What a rail is made of: TCP sockets, or UCX over TCP or RDMA; and how the ranks come to agree on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.transport.rails import ucx_endpoint as plug
from mpi_gpucomp.transport.rails.connector import Introducing, Refused
from mpi_gpucomp.transport.rails.tcp import TcpPath
from mpi_gpucomp.transport.rails.ucx import UcxPath

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from mpi_gpucomp.transport.rails.connector import Answering, Dialling
    from mpi_gpucomp.transport.rails.discovery import Rail
    from mpi_gpucomp.transport.rails.link import Path, RailLink
    from mpi_gpucomp.transport.rails.loop import Loop
    from mpi_gpucomp.transport.rails.sequence import Key

    Talk = Answering | Dialling | Introducing

__all__ = ["AUTO", "RDMA", "TCP", "UCX", "Offer", "Wire", "agree", "make", "offer"]

TCP, UCX, AUTO = "tcp", "ucx", "auto"
"""What users say: sockets, UCX, or UCX where it gains something."""
RDMA = "ucx over RDMA"
INSTALL = "pip install mpi_gpucomp[ucx]"


class Offer(NamedTuple):
    """What a rank could do."""

    wire: str
    """What its user has said."""
    has_ucx: bool
    version: str
    """Of UCX, or why there is none."""
    rdma: tuple[bool, ...]
    """For each rail, whether UCX reaches an RDMA device there."""
    fault: str | None = None


def offer(wire: str, rails: Sequence[Rail]) -> Offer:
    """Look at what there is here; nothing is loaded that is not asked for."""
    if wire == TCP:
        return Offer(wire, False, "not asked for", (False,) * len(rails))
    has_ucx, version = plug.version()
    rdma = tuple(has_ucx and _has_rdma(rail) for rail in rails)
    return Offer(wire, has_ucx, version, rdma, _fault(rails, rdma) if wire == UCX and has_ucx else None)


def _has_rdma(rail: Rail) -> bool:
    port = plug.rdma_port(rail.device)
    try:
        return port is not None and plug.context(port, "ib") is not None
    except plug.PlugError:
        return False


def _fault(rails: Sequence[Rail], rdma: Sequence[bool]) -> str | None:
    """Say why UCX cannot use a rail, if it cannot."""
    for rail, has_rdma in zip(rails, rdma, strict=True):
        try:
            _ = has_rdma or plug.context(rail.link or rail.name, "tcp")
        except plug.PlugError as error:
            return str(error)
    return None


def agree(offers: Sequence[Offer], rank: int) -> list[str]:
    """Return what each rail is made of, the same on all ranks; all raise if they cannot agree."""
    said = [one.wire for one in offers]
    if len(set(said)) > 1:
        raise _disagree("the same on every rank", said, "Pass the same wire on every rank.", rank)
    alike = all(one.has_ucx for one in offers) and len({one.version for one in offers}) == 1
    if said[0] == UCX:
        _check(offers, rank, alike=alike)
    if said[0] == TCP or not alike:
        return [TCP] * len(offers[0].rdma)
    rest = UCX if said[0] == UCX else TCP
    return [RDMA if all(having) else rest for having in zip(*(one.rdma for one in offers), strict=True)]


def _check(offers: Sequence[Offer], rank: int, *, alike: bool) -> None:
    versions = [one.version for one in offers]
    if not all(one.has_ucx for one in offers):
        remedy = f"Install ucxx there ({INSTALL}), or choose wire='tcp' or wire='auto'."
        raise _disagree("UCX on every rank", versions, remedy, rank)
    if not alike:
        raise _disagree("the same UCX on every rank", versions, "Install the same version everywhere.", rank)
    faults = [one.fault for one in offers]
    if any(faults):
        remedy = "Name devices that UCX can use (ucx_info -d lists them), or choose wire='tcp'."
        raise _disagree("devices that UCX can use", [fault or "fine" for fault in faults], remedy, rank)


def _disagree(expected: str, got: Sequence[str], remedy: str, rank: int) -> SpecError:
    listed = "; ".join(f"rank {number}: {one}" for number, one in enumerate(got))
    return SpecError("wire of rails", expected=expected, got=listed, remedy=remedy, rank=rank)


class Wire(Protocol):
    """Makes paths of connections whose ends know each other."""

    def meet(self, talk: Answering | Dialling) -> Talk:
        """Return what the ends have to say to each other before they are a path, beginning with the handshake."""
        ...

    def path(self, key: Key, connection: socket.socket, talk: Talk, link: RailLink, loop: Loop) -> Path:
        """Make a path; raise Refused if it cannot be made."""
        ...


class TcpWire:
    """Sockets."""

    def __init__(self, rail: Rail) -> None:
        """Serve one rail."""
        self._rail = rail

    def meet(self, talk: Answering | Dialling) -> Talk:
        """Add nothing to the handshake."""
        return talk

    def path(self, key: Key, connection: socket.socket, talk: Talk, link: RailLink, loop: Loop) -> Path:
        """Use the connection itself."""
        return TcpPath(key, connection, self._rail, link, loop)


class _Plugging(Introducing):
    """A handshake followed by an exchange of UCX addresses."""

    def __init__(self, talk: Answering | Dialling, devices: str, transports: str) -> None:
        super().__init__(talk, self._made)
        self._where = devices, transports
        self.plug: plug.Plug | None = None

    def _made(self) -> bytes:
        self.plug = plug.Plug(*self._where)
        return self.plug.card


class UcxWire:
    """UCX, on the device of a rail."""

    def __init__(self, rail: Rail, *, rdma: bool) -> None:
        """Serve one rail."""
        self._rail = rail
        port = plug.rdma_port(rail.device) if rdma else None
        self._where = (port, "ib") if port is not None else (rail.link or rail.name, "tcp")

    def meet(self, talk: Answering | Dialling) -> Talk:
        """Let UCX's addresses be exchanged once both ends have proved themselves."""
        return _Plugging(talk, *self._where)

    def path(self, key: Key, connection: socket.socket, talk: Talk, link: RailLink, loop: Loop) -> Path:
        """Connect to the peer's worker; the connection stays beside it."""
        assert isinstance(talk, _Plugging) and talk.plug is not None
        try:
            talk.plug.connect(talk.theirs)
            return UcxPath(key, connection, talk.plug, self._rail, link, loop)
        except plug.PlugError as error:
            raise Refused(str(error)) from error


def make(kind: str, rail: Rail) -> Wire:
    """Return the wire of a rail."""
    return TcpWire(rail) if kind == TCP else UcxWire(rail, rdma=kind == RDMA)
