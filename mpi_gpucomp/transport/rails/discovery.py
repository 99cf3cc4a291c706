"""Rails of a job: the user's settings, this host's network devices, and the exchange of addresses.

    eth0,eth1       eth0, and eth1 while eth0 is down
    eth0+eth1       both at once
    eth0+eth1,mgmt  both at once, and mgmt while both are down

A device is given by name, by address, or by a network such as 10.1.0.0/16, which matches one on every host. A device
given by name is used over IPv4 if it has such an address. An error on one rank is raised on all.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import secrets
import socket
import struct
from contextlib import suppress
from functools import cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp import config
from mpi_gpucomp.errors import GpucompError, RankFailedError, SpecError
from mpi_gpucomp.transport.rails import backends
from mpi_gpucomp.transport.rails.backends import Capabilities
from mpi_gpucomp.transport.rails.connector import SECRET_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from mpi_gpucomp.transport.bootstrap import Bootstrap
    from mpi_gpucomp.transport.rails.backends import RailBackend

__all__ = [
    "Peers",
    "Rail",
    "Rails",
    "addresses",
    "check_connected",
    "discover",
    "find_rail",
    "listen",
    "networks",
    "resolve_rails",
]

SIOCGIFFLAGS, SIOCGIFADDR, SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
IFF_UP, IFF_RUNNING = 0x1, 0x40
GLOBAL_SCOPE, HOST_SCOPE = 0x00, 0x10
"""Scopes of the IPv6 addresses that need no device to be reached."""
_IFREQ = struct.Struct("16s16x")


MAX_STRIPES = 16


class Rails(NamedTuple):
    """The devices to use, the timeouts, the backend, and the sockets of each rail."""

    devices: str
    timeout: float = config.RAIL_TIMEOUT.default
    """Seconds without a sign of life after which a path is dead."""
    limit: float = config.RAIL_LIMIT.default
    """Seconds without any path after which a peer is considered failed."""
    wire: str = config.RAIL_WIRE.default
    """The backend: tcp (sockets), ucx, or auto (UCX where all ranks have it and the device has RDMA)."""
    stripes: int = 1
    """Sockets to each peer on each rail, for a network that one connection does not fill."""

    @property
    def tiers(self) -> list[list[str]]:
        """Return the names of devices that are used together, the preferred ones first."""
        return [[name.strip() for name in tier.split("+")] for tier in self.devices.split(",")]

    def check(self) -> Rails:
        """Return itself, or raise SpecError if a value is invalid."""
        config.RAILS.read(self.devices, "rails")
        config.RAIL_WIRE.read(self.wire, "wire of rails")
        for name, seconds in (("timeout", self.timeout), ("limit", self.limit)):
            if not (isfinite(seconds) and seconds > 0):
                raise SpecError(
                    f"{name} of rails", expected="seconds, more than 0", got=f"{seconds}", remedy="Give a time."
                )
        if not 0 < self.stripes <= MAX_STRIPES:
            expected = f"1 to {MAX_STRIPES} sockets"
            raise SpecError("stripes of rails", expected=expected, got=f"{self.stripes}", remedy="Give a number.")
        return self


def resolve_rails(argument: str | Rails | None, environment: Mapping[str, str] | None = None) -> Rails | None:
    """Return the rails of the argument, or else of the environment; None for no rails."""
    if isinstance(argument, Rails):
        return argument.check()
    devices = config.RAILS.get(argument, environment)
    if not devices:
        return None
    timeout, limit = (setting.get(None, environment) for setting in (config.RAIL_TIMEOUT, config.RAIL_LIMIT))
    return Rails(devices, timeout, limit, config.RAIL_WIRE.get(None, environment)).check()


@cache
def _query_socket() -> socket.socket:
    """Return a socket for queries of the kernel, kept open: carriers are checked often."""
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def _query(request: int, device: str) -> bytes | None:
    """Query a device in this process's network namespace."""
    try:
        return fcntl.ioctl(_query_socket(), request, _IFREQ.pack(device.encode()[:15]))
    except OSError:
        return None


def _address_of(device: str) -> str | None:
    answer = _query(SIOCGIFADDR, device)
    return None if answer is None else socket.inet_ntoa(answer[20:24])


def _ipv6_addresses() -> Iterator[tuple[str, str]]:
    """Return the devices and addresses of IPv6 that other hosts, or other processes, can connect to."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return
    for address, _, _, scope, _, device in map(str.split, lines):
        if int(scope, 16) in (GLOBAL_SCOPE, HOST_SCOPE):
            yield device, str(ipaddress.IPv6Address(int(address, 16)))


def _in_network_of(address: str, device: str) -> bool:
    """Return True if an address is in a device's network."""
    if ":" in address:
        return (device, address) in _ipv6_addresses()
    own, mask = (_query(request, device) for request in (SIOCGIFADDR, SIOCGIFNETMASK))
    if own is None or mask is None:
        return False
    network = f"{socket.inet_ntoa(own[20:24])}/{socket.inet_ntoa(mask[20:24])}"
    return ipaddress.IPv4Address(address) in ipaddress.IPv4Network(network, strict=False)


def addresses() -> dict[str, str]:
    """Return the devices that have an address, and that of IPv4 if there is one."""
    ipv6 = dict(reversed(list(_ipv6_addresses())))  # the first address of each device
    found = ((name, _address_of(name) or ipv6.get(name)) for _, name in socket.if_nameindex())
    return {name: address for name, address in found if address is not None}


def networks() -> dict[str, str]:
    """Return the IPv4 networks of this host's devices that are up, and the device of each."""
    found = {}
    for _, name in socket.if_nameindex():
        own, mask, flags = (_query(request, name) for request in (SIOCGIFADDR, SIOCGIFNETMASK, SIOCGIFFLAGS))
        if own is None or mask is None or flags is None or not int.from_bytes(flags[16:18], "little") & IFF_UP:
            continue
        address = f"{socket.inet_ntoa(own[20:24])}/{socket.inet_ntoa(mask[20:24])}"
        found[str(ipaddress.IPv4Network(address, strict=False))] = name
    return found


class Rail(NamedTuple):
    """A rail's device on this host."""

    name: str
    """As given by the user."""
    address: str
    device: str | None
    """The device that sockets are bound to; None where the address suffices."""

    def has_carrier(self) -> bool:
        """Return True if the device is up and has a carrier, as far as the kernel knows."""
        if self.device is None:
            return True
        answer = _query(SIOCGIFFLAGS, self.device)
        wanted = IFF_UP | IFF_RUNNING
        return answer is not None and int.from_bytes(answer[16:18], "little") & wanted == wanted

    @property
    def interface(self) -> str | None:
        """Return the device of the address, even if sockets are not bound to it."""
        if self.device:
            return self.device
        return next((name for _, name in socket.if_nameindex() if _in_network_of(self.address, name)), None)

    def socket(self) -> socket.socket:
        """Return a socket whose traffic uses this rail only."""
        made = socket.socket(_family(self.address), socket.SOCK_STREAM)
        if self.device is not None:
            with suppress(PermissionError):  # an old kernel; the address still selects the route
                made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, self.device.encode() + b"\0")
        return made


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def find_rail(name: str, rank: int) -> Rail:
    """Find a rail's device on this host."""
    present = addresses()
    if name in present:
        return Rail(name, present[name], name)
    try:
        network = ipaddress.ip_network(name, strict=False)
    except ValueError:
        network = None
    if network is not None:
        own = _ipv6_addresses() if network.version == 6 else present.items()
        for device, address in own:
            if ipaddress.ip_address(address) in network:
                return Rail(name, address, device)
        if network.prefixlen == network.max_prefixlen and _can_bind(name):
            return Rail(name, name, None)
    listed = ", ".join(f"{device} ({address})" for device, address in present.items())
    raise SpecError(
        "rails",
        expected="network devices with an IP address, by name, address or network",
        got=f"'{name}'",
        remedy=f"This host has {listed}.",
        rank=rank,
    )


def _can_bind(address: str) -> bool:
    """Return True for an address of this host that no device lists: 127.0.0.2, or a device's second one."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as attempt:
        try:
            attempt.bind((address, 0))
        except OSError:
            return False
    return True


def listen(rail: Rail) -> socket.socket:
    """Return a socket that listens on a rail, on a port chosen by the kernel."""
    made = rail.socket()
    made.bind((rail.address, 0))
    made.listen(128)
    made.setblocking(False)
    return made


class Peers(NamedTuple):
    """The rails of this rank, and the addresses of all ranks."""

    rails: list[Rail]
    tiers: list[list[int]]
    """Numbers of rails that are used together, the preferred ones first."""
    backends: list[RailBackend]
    """The backend of each rail."""
    listeners: list[socket.socket]
    secret: bytes
    addresses: list[list[tuple[str, int]]]
    """For each rank, its listening address on each rail."""


class _RankInfo(NamedTuple):
    """What a rank publishes."""

    addresses: list[tuple[str, int]]
    tiers: list[list[int]]
    capabilities: Capabilities
    fault: str | None
    stripes: int

    @classmethod
    def parse(cls, text: str, peer: int, rank: int) -> _RankInfo:
        """Read the JSON of a peer."""
        try:
            listening, tiers, (wire, has_ucx, version, rdma, ucx_fault), fault, stripes = json.loads(text)
            return cls(
                [(str(host), int(port)) for host, port in listening],
                [[int(rail) for rail in tier] for tier in tiers],
                Capabilities(
                    str(wire),
                    bool(has_ucx),
                    str(version),
                    tuple(map(bool, rdma)),
                    None if ucx_fault is None else str(ucx_fault),
                ),
                None if fault is None else str(fault),
                int(stripes),
            )
        except (ValueError, TypeError) as error:
            raise SpecError(
                f"rails of rank {peer}",
                expected="addresses, tiers and capabilities",
                got=f"{text[:200]!r}",
                remedy="Install the same version of mpi_gpucomp on every rank.",
                rank=rank,
            ) from error


def discover(bootstrap: Bootstrap, settings: Rails) -> Peers:
    """Listen on this rank's rails, and exchange addresses and a secret with all ranks; collective."""
    rails: list[Rail] = []
    listeners: list[socket.socket] = []
    names, fault = settings.tiers, None
    try:
        rails = [find_rail(name, bootstrap.rank) for tier in names for name in tier]
        listeners += map(listen, rails)
    except (GpucompError, OSError) as error:
        fault = str(error)
    numbers = iter(range(sum(map(len, names))))
    tiers = [[next(numbers) for _ in tier] for tier in names]
    capabilities = backends.probe_capabilities(settings.wire, rails)
    listening = [one.getsockname()[:2] for one in listeners]
    own = _RankInfo(listening, tiers, capabilities, fault, settings.stripes)
    texts = bootstrap.allgather(json.dumps(own).encode())
    try:
        decoded = (text.decode(errors="replace") for text in texts)
        ranks = [_RankInfo.parse(text, peer, bootstrap.rank) for peer, text in enumerate(decoded)]
        _check(ranks, bootstrap.rank)
        kinds = backends.agree([info.capabilities for info in ranks], bootstrap.rank)
        _check_stripes(kinds, settings.stripes, bootstrap.rank)
    except SpecError:
        for listener in listeners:
            listener.close()
        raise
    secret = bootstrap.allgather(secrets.token_bytes(SECRET_BYTES) if bootstrap.rank == 0 else b"")[0]
    made = list(map(backends.make_backend, kinds, rails))
    return Peers(rails, tiers, made, listeners, secret, [info.addresses for info in ranks])


def _check(ranks: list[_RankInfo], rank: int) -> None:
    faults = [info.fault for info in ranks if info.fault is not None]
    if faults:
        raise SpecError(
            "rails",
            expected="devices that every rank has",
            got="; ".join(fault.removesuffix(".") for fault in faults),
            remedy="Name devices that every host has, or networks, which match on all.",
            rank=rank,
        )
    if any(info.tiers != ranks[0].tiers for info in ranks):
        raise SpecError(
            "rails",
            expected="the same number and order of devices on every rank",
            got="; ".join(f"rank {other}: {info.tiers}" for other, info in enumerate(ranks)),
            remedy="Pass the same rails on every rank.",
            rank=rank,
        )
    families = [[_family(host).name for host, _ in info.addresses] for info in ranks]
    if any(found != families[0] for found in families):
        raise SpecError(
            "rails",
            expected="addresses of the same family on every rank",
            got="; ".join(f"rank {other}: {', '.join(found)}" for other, found in enumerate(families)),
            remedy="Name devices by network, such as 10.1.0.0/16 or fd00::/64.",
            rank=rank,
        )
    if any(info.stripes != ranks[0].stripes for info in ranks):
        raise SpecError(
            "stripes of rails",
            expected="the same on every rank",
            got="; ".join(f"rank {other}: {info.stripes}" for other, info in enumerate(ranks)),
            remedy="Pass the same stripes on every rank.",
            rank=rank,
        )


def _check_stripes(kinds: list[str], stripes: int, rank: int) -> None:
    if stripes > 1 and any(kind != backends.TCP for kind in kinds):
        remedy = f"Set stripes=1, or wire='{backends.TCP}'."
        raise SpecError("stripes of rails", expected="1 with UCX", got=f"{stripes}", remedy=remedy, rank=rank)


def check_connected(bootstrap: Bootstrap, settings: Rails, unreached: Iterable[int]) -> None:
    """Raise on all ranks if a rank could not connect to its peers `unreached`; collective."""
    lost = bootstrap.allgather(json.dumps(list(unreached)).encode())
    found = ((rank, int(peer)) for rank, text in enumerate(lost) for peer in json.loads(text))
    pairs = sorted({(min(pair), max(pair)) for pair in found})
    if pairs:
        raise RankFailedError(
            "rails",
            expected=f"a path between every pair of ranks on {settings.devices}",
            got=f"none between ranks {', '.join(f'{one} and {two}' for one, two in pairs)}",
            remedy="Check that these devices are in one network, without a firewall between them.",
            rank=bootstrap.rank,
        )
