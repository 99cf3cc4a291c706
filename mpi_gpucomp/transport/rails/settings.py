"""What a user says of rails: which devices, in which order, made of what, and how long to wait.

    eth0,eth1       eth0, and eth1 where eth0 is dead
    eth0+eth1       both at once
    eth0+eth1,mgmt  both at once, and mgmt where both are dead

A device is a name, an address or a network, such as 10.1.0.0/16, which names it on every machine.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp import config
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Rails", "chosen"]


class Rails(NamedTuple):
    """Which devices to use, how long to wait, and what to use them with."""

    devices: str
    timeout: float = config.RAIL_TIMEOUT.default
    """Seconds after which a path that gives no sign of life is dead."""
    limit: float = config.RAIL_LIMIT.default
    """Seconds without any path after which a peer is given up."""
    wire: str = config.RAIL_WIRE.default
    """What paths are made of: tcp (sockets), ucx, or auto (UCX where all ranks have it and the device has RDMA)."""

    @property
    def tiers(self) -> list[list[str]]:
        """Return the names of devices that are used at once, those to be used first in front."""
        return [[name.strip() for name in tier.split("+")] for tier in self.devices.split(",")]

    def check(self) -> Rails:
        """Return itself, if it means something."""
        config.RAILS.read(self.devices, "rails")
        config.RAIL_WIRE.read(self.wire, "wire of rails")
        for name, seconds in (("timeout", self.timeout), ("limit", self.limit)):
            if not (isfinite(seconds) and seconds > 0):
                raise SpecError(
                    f"{name} of rails", expected="seconds, more than 0", got=f"{seconds}", remedy="Give a time."
                )
        return self


def chosen(said: str | Rails | None, environment: Mapping[str, str] | None = None) -> Rails | None:
    """Return what the caller has said, or else the environment; None for no rails."""
    if isinstance(said, Rails):
        return said.check()
    devices = config.RAILS.get(said, environment)
    if not devices:
        return None
    timeout, limit = (setting.get(None, environment) for setting in (config.RAIL_TIMEOUT, config.RAIL_LIMIT))
    return Rails(devices, timeout, limit, config.RAIL_WIRE.get(None, environment)).check()
