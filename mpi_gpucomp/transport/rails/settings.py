"""What a user says of rails: which devices, in which order, made of what, and how long to wait.

    eth0,eth1       eth0, and eth1 where eth0 is dead
    eth0+eth1       both at once
    eth0+eth1,mgmt  both at once, and mgmt where both are dead

A device is a name, an address or a network, such as 10.1.0.0/16, which names it on every machine.
"""

from __future__ import annotations

import os
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Rails", "chosen"]

DEVICES, TIMEOUT, LIMIT = "MPI_GPUCOMP_RAILS", "MPI_GPUCOMP_RAIL_TIMEOUT", "MPI_GPUCOMP_RAIL_LIMIT"
WIRE = "MPI_GPUCOMP_RAIL_WIRE"
WIRES = ("tcp", "ucx", "auto")


class Rails(NamedTuple):
    """Which devices to use, how long to wait, and what to use them with."""

    devices: str
    timeout: float = 1.0
    """Seconds after which a path that gives no sign of life is dead."""
    limit: float = 30.0
    """Seconds without any path after which a peer is given up."""
    wire: str = "tcp"
    """What paths are made of: tcp (sockets), ucx, or auto (UCX where all ranks have it and the device has RDMA)."""

    @property
    def tiers(self) -> list[list[str]]:
        """Return the names of devices that are used at once, those to be used first in front."""
        return [[name.strip() for name in tier.split("+")] for tier in self.devices.split(",")]

    def check(self) -> Rails:
        """Return itself, if it means something."""
        names = [name for tier in self.tiers for name in tier]
        if not all(names) or len(set(names)) < len(names):
            raise SpecError(
                "rails",
                expected="devices that differ, such as eth0,eth1 or eth0+eth1",
                got=f"'{self.devices}'",
                remedy="Name each device once.",
            )
        if self.wire not in WIRES:
            raise SpecError(
                "wire of rails", expected="tcp, ucx or auto", got=f"'{self.wire}'", remedy="Choose one of them."
            )
        for name, seconds in (("timeout", self.timeout), ("limit", self.limit)):
            if not (isfinite(seconds) and seconds > 0):
                raise SpecError(
                    f"{name} of rails", expected="seconds, more than 0", got=f"{seconds}", remedy="Give a time."
                )
        return self


def chosen(said: str | Rails | None, environment: Mapping[str, str] | None = None) -> Rails | None:
    """Return what the caller has said, or else the environment; None for no rails."""
    given = os.environ if environment is None else environment
    if isinstance(said, Rails):
        return said.check()
    devices = given.get(DEVICES, "") if said is None else said
    if not devices:
        return None
    defaults = Rails(devices)
    timeout, limit = _seconds(given, TIMEOUT, defaults.timeout), _seconds(given, LIMIT, defaults.limit)
    return Rails(devices, timeout, limit, given.get(WIRE, "") or defaults.wire).check()


def _seconds(environment: Mapping[str, str], variable: str, default: float) -> float:
    text = environment.get(variable, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise SpecError(
            f"environment variable {variable}",
            expected="seconds",
            got=f"'{text}'",
            remedy=f"Set a number, or unset it for {default:g}.",
        ) from None
