"""Names and addresses in a cluster: each is a function of host, rail and rack numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpi_gpucomp.errors import SpecError

__all__ = ["DEFAULT_NAME", "Plan", "namespaces_of", "path_of"]

DEFAULT_NAME = "osub"
MOST_HOSTS, MOST_RAILS = 200, 8
SWITCH_NUMBER = 254
NAMESPACES = Path("/run/netns")


@dataclass(frozen=True)
class Plan:
    """A cluster's layout: hosts with one link per rail, and one switch per rack.

    Hosts are assigned to racks round-robin. Uplinks join the switches of several racks through a core switch.
    """

    name: str
    hosts: int
    rails: int = 1
    racks: int = 1

    def __post_init__(self) -> None:
        """Validate the numbers and the name."""
        _check_range("hosts", self.hosts, MOST_HOSTS)
        _check_range("rails", self.rails, MOST_RAILS)
        _check_range("racks", self.racks, self.hosts)
        if not re.fullmatch(r"[a-z][a-z0-9]{0,19}", self.name):
            remedy = "Choose a name such as osub."
            expected = "at most 20 lower-case letters and digits, beginning with a letter"
            raise SpecError("name of a cluster", expected=expected, got=f"'{self.name}'", remedy=remedy)

    @property
    def switch(self) -> str:
        """The namespace of the switch, in which the launcher runs too."""
        return f"{self.name}-switch"

    def namespace(self, host: int) -> str:
        """Return the namespace of a host."""
        return f"{self.name}-{self.host_name(host)}"

    @property
    def namespaces(self) -> list[str]:
        """All namespaces, the switch first."""
        return [self.switch, *(self.namespace(host) for host in range(self.hosts))]

    def links(self) -> Iterator[tuple[int, int]]:
        """Iterate over the (host, rail) of every link."""
        return ((host, rail) for host in range(self.hosts) for rail in range(self.rails))

    def check_link(self, host: int, rail: int) -> None:
        """Raise SpecError if the host or the rail does not exist."""
        for what, number, count in (("host", host, self.hosts), ("rail", rail, self.rails)):
            if not 0 <= number < count:
                remedy = "See `osu_bench cluster status`."
                raise SpecError(f"{what} of the cluster", expected=_range(count), got=str(number), remedy=remedy)

    def host_name(self, host: int) -> str:
        """Return a host's name."""
        return f"h{host}"

    def interface(self, rail: int) -> str:
        """Return the host's end of a link."""
        return f"eth{rail}"

    def port(self, host: int, rail: int) -> str:
        """Return the switch's end of a link."""
        return f"h{host}r{rail}"

    def rack(self, host: int) -> int:
        """Return the number of a host's rack."""
        return host % self.racks

    def bridge(self, rail: int, rack: int = 0) -> str:
        """Return the bridge of a rail, in one rack if there are several."""
        return f"rail{rail}" if self.racks == 1 else f"rail{rail}k{rack}"

    def core(self, rail: int) -> str:
        """Return the bridge that joins the racks of a rail."""
        return f"core{rail}"

    def uplinks(self) -> list[tuple[int, int]]:
        """Return the (rack, rail) of every uplink; a single rack has none."""
        return [(rack, rail) for rack in range(self.racks) for rail in range(self.rails)] if self.racks > 1 else []

    def uplink(self, rack: int, rail: int) -> tuple[str, str]:
        """Return both ends of an uplink, the rack's end first."""
        return f"k{rack}r{rail}", f"c{rack}r{rail}"

    def address(self, host: int, rail: int) -> str:
        """Return the address of a host on a rail."""
        return f"10.78.{rail}.{host + 1}"

    def network(self, rail: int) -> str:
        """Return the network of a rail."""
        return f"10.78.{rail}.0/24"

    # Launchers communicate over a separate network, which is never shaped or cut.
    management_network = "10.77.0.0/24"
    management = "mgmt"

    def management_port(self, host: int) -> str:
        """Return the switch's end of a host's management link."""
        return f"h{host}m"

    def management_address(self, host: int | None = None) -> str:
        """Return the address of a host, or of the switch, on the management network."""
        return f"10.77.0.{SWITCH_NUMBER if host is None else host + 1}"


def _check_range(what: str, number: int, most: int) -> None:
    if not 1 <= number <= most:
        remedy = "Choose a number in that range."
        raise SpecError(f"{what} of a cluster", expected=f"1 to {most}", got=str(number), remedy=remedy)


def _range(count: int) -> str:
    return "0" if count == 1 else f"0 to {count - 1}"


def path_of(namespace: str) -> Path:
    """Return the file that a network namespace is bound to."""
    return NAMESPACES / namespace


def namespaces_of(name: str) -> list[str]:
    """Return the existing namespaces of a cluster, including those of a partial one."""
    if not NAMESPACES.is_dir():
        return []
    own = re.compile(rf"{re.escape(name)}-(switch|h\d+)")
    return sorted(path.name for path in NAMESPACES.iterdir() if own.fullmatch(path.name))
