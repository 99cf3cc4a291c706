"""How the ranks of a job find each other's rails, with MPI's help, and agree on a secret.

What is wrong on one rank is an error on all of them.
"""

from __future__ import annotations

import fcntl
import ipaddress
import secrets
import socket
import struct
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.errors import GpucompError, RankFailedError, SpecError
from mpi_gpucomp.transport.rails import backends as wires
from mpi_gpucomp.transport.rails.connector import SECRET_BYTES

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable

    from mpi4py import MPI

    from mpi_gpucomp.transport.rails.backends import Offer, Wire
    from mpi_gpucomp.transport.rails.settings import Rails

__all__ = ["Gathered", "Rail", "addresses", "check_reached", "find", "gather", "listen"]


# The network devices that rails run on: found by name, by address, or by the network that they are in.

SIOCGIFFLAGS, SIOCGIFADDR, SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
IFF_UP, IFF_RUNNING = 0x1, 0x40
_REQUEST = struct.Struct("16s16x")


@cache
def _asking() -> socket.socket:
    """Return a socket to ask the kernel by, which stays open: paths are looked at often."""
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def _asked(what: int, device: str) -> bytes | None:
    """Ask the kernel of a device, in the network namespace of this process."""
    try:
        return fcntl.ioctl(_asking(), what, _REQUEST.pack(device.encode()[:15]))
    except OSError:
        return None


def _address_of(device: str) -> str | None:
    said = _asked(SIOCGIFADDR, device)
    return None if said is None else socket.inet_ntoa(said[20:24])


def _is_near(address: str, device: str) -> bool:
    """Say whether an address is in a device's network."""
    own, mask = (_asked(what, device) for what in (SIOCGIFADDR, SIOCGIFNETMASK))
    if own is None or mask is None:
        return False
    network = f"{socket.inet_ntoa(own[20:24])}/{socket.inet_ntoa(mask[20:24])}"
    return ipaddress.IPv4Address(address) in ipaddress.IPv4Network(network, strict=False)


def addresses() -> dict[str, str]:
    """Return the devices that have an IPv4 address."""
    found = ((name, _address_of(name)) for _, name in socket.if_nameindex())
    return {name: address for name, address in found if address is not None}


class Rail(NamedTuple):
    """One end of the way that a rail takes."""

    name: str
    """As the user has written it."""
    address: str
    device: str | None
    """What sockets are bound to; None where the address alone says it."""

    def has_carrier(self) -> bool:
        """Say whether the device is up and its cable is plugged in, as far as the kernel knows."""
        if self.device is None:
            return True
        said = _asked(SIOCGIFFLAGS, self.device)
        wanted = IFF_UP | IFF_RUNNING
        return said is not None and int.from_bytes(said[16:18], "little") & wanted == wanted

    @property
    def link(self) -> str | None:
        """Return the device that the address belongs to, though sockets may not be bound to it."""
        return self.device or next((name for _, name in socket.if_nameindex() if _is_near(self.address, name)), None)

    def socket(self) -> socket.socket:
        """Return a socket whose traffic takes this rail and no other."""
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if self.device is not None:
            with suppress(PermissionError):  # an old kernel; the address still says where to go
                made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, self.device.encode() + b"\0")
        return made


def find(name: str, rank: int) -> Rail:
    """Find a rail's device on this machine."""
    there = addresses()
    if name in there:
        return Rail(name, there[name], name)
    try:
        network = ipaddress.IPv4Network(name, strict=False)
    except ValueError:
        network = None
    if network is not None:
        device = next((device for device, address in there.items() if ipaddress.IPv4Address(address) in network), None)
        if device is not None:
            return Rail(name, there[device], device)
        if network.prefixlen == 32 and _can_bind(name):
            return Rail(name, name, None)
    listed = ", ".join(f"{device} ({address})" for device, address in there.items())
    raise SpecError(
        "rails",
        expected="network devices with an IPv4 address, by name, address or network",
        got=f"'{name}'",
        remedy=f"This machine has {listed}.",
        rank=rank,
    )


def _can_bind(address: str) -> bool:
    """Say whether an address is one of ours though no device lists it: 127.0.0.2, or a second one of a device."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((address, 0))
        except OSError:
            return False
    return True


def listen(rail: Rail) -> socket.socket:
    """Return a socket that listens on a rail, on a port that the kernel chooses."""
    made = rail.socket()
    made.bind((rail.address, 0))
    made.listen(128)
    made.setblocking(False)
    return made


class Gathered(NamedTuple):
    """What a rank knows of its own rails, and of the others'."""

    rails: list[Rail]
    tiers: list[list[int]]
    """Numbers of rails that are used at once, those to be used first in front."""
    wires: list[Wire]
    """What each rail is made of."""
    listeners: list[socket.socket]
    secret: bytes
    addresses: list[list[tuple[str, int]]]
    """For each rank, where it listens on each rail."""


class _Side(NamedTuple):
    """What a rank tells the others."""

    addresses: list[tuple[str, int]]
    tiers: list[list[int]]
    offer: Offer
    fault: str | None


def gather(comm: MPI.Intracomm, settings: Rails) -> Gathered:
    """Listen on the rails of this rank, and tell all ranks where: all do."""
    rails: list[Rail] = []
    listeners: list[socket.socket] = []
    names, fault = settings.tiers, None
    try:
        rails = [find(name, comm.rank) for tier in names for name in tier]
        listeners += map(listen, rails)
    except (GpucompError, OSError) as error:
        fault = str(error)
    numbers = iter(range(sum(map(len, names))))
    tiers = [[next(numbers) for _ in tier] for tier in names]
    offer, addresses = wires.offer(settings.wire, rails), [one.getsockname()[:2] for one in listeners]
    sides: list[_Side] = comm.allgather(_Side(addresses, tiers, offer, fault))
    try:
        _check(sides, comm.rank)
        kinds = wires.agree([side.offer for side in sides], comm.rank)
    except SpecError:
        for listener in listeners:
            listener.close()
        raise
    secret = bytearray(secrets.token_bytes(SECRET_BYTES))
    comm.Bcast(secret)
    made = list(map(wires.make, kinds, rails))
    return Gathered(rails, tiers, made, listeners, bytes(secret), [side.addresses for side in sides])


def _check(sides: list[_Side], rank: int) -> None:
    faults = [side.fault for side in sides if side.fault is not None]
    if faults:
        raise SpecError(
            "rails",
            expected="devices that every rank has",
            got="; ".join(fault.removesuffix(".") for fault in faults),
            remedy="Name devices that are there, or networks, which fit all ranks.",
            rank=rank,
        )
    if any(side.tiers != sides[0].tiers for side in sides):
        raise SpecError(
            "rails",
            expected="the same number and order of devices on every rank",
            got="; ".join(f"rank {other}: {side.tiers}" for other, side in enumerate(sides)),
            remedy="Pass the same rails on every rank.",
            rank=rank,
        )


def check_reached(comm: MPI.Intracomm, settings: Rails, missing: Iterable[int]) -> None:
    """Raise on all ranks if one of them has not reached those that are `missing`."""
    lost: list[list[int]] = comm.allgather(sorted(missing))
    pairs = sorted({(min(rank, peer), max(rank, peer)) for rank, peers in enumerate(lost) for peer in peers})
    if pairs:
        raise RankFailedError(
            "rails",
            expected=f"a way from every rank to every other on {settings.devices}",
            got=f"none between ranks {', '.join(f'{one} and {two}' for one, two in pairs)}",
            remedy="See whether these devices are in one network, and whether a firewall is between them.",
            rank=comm.rank,
        )
