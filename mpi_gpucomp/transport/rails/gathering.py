"""How the ranks of a job find each other's rails, with MPI's help, and agree on a secret.

What is wrong on one rank is an error on all of them.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.errors import GpucompError, RankFailedError, SpecError
from mpi_gpucomp.transport.rails import devices, wires
from mpi_gpucomp.transport.rails.handshake import SECRET_BYTES

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable

    from mpi4py import MPI

    from mpi_gpucomp.transport.rails.devices import Rail
    from mpi_gpucomp.transport.rails.settings import Rails
    from mpi_gpucomp.transport.rails.wires import Offer, Wire

__all__ = ["Gathered", "check_reached", "gather"]


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
        rails = [devices.find(name, comm.rank) for tier in names for name in tier]
        listeners += map(devices.listen, rails)
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
