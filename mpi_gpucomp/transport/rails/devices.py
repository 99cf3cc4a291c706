"""The network devices that rails run on: found by name, by address, or by the network that they are in."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from mpi_gpucomp.errors import SpecError

__all__ = ["Rail", "addresses", "find", "listen"]

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
