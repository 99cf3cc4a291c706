"""Many ranks in one process: messages are copied between their buffers.

A send completes when the message has been received, as in a network's rendezvous protocol, or at once if it has at most
`eager` bytes. Programs that rely on more buffering than MPI guarantees deadlock here too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.core.library import core
from mpi_gpucomp.core.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LoopbackNetwork", "LoopbackWire", "loopback"]

LARGEST_TAG, ANY = (1 << 31) - 1, -1
DAMAGES = {"flip": 0, "cut": 1, "repeat": 2, "lose": 3}


class LoopbackNetwork:
    """The queues shared by the ranks of one process."""

    def __init__(self, size: int, eager: int = 0, delay: int = 0, seed: int = 0) -> None:
        """Connect `size` ranks; with `delay`, each message waits for up to so many polls of its receiver."""
        self.size = size
        self.handle = core().gc_loopback_new(size, eager, delay, seed)

    def set_rate(self, sender: int, receiver: int, bytes_per_second: float) -> None:
        """Limit the bandwidth of a link; messages posted on it arrive one behind the other."""
        core().gc_loopback_set_rate(self.handle, sender, receiver, bytes_per_second)

    def lose(self, rank: int) -> None:
        """Let the other ranks find that a rank has ended."""
        core().gc_loopback_lose(self.handle, rank)

    @property
    def left(self) -> int:
        """The number of messages, receives and control messages in flight."""
        count: int = core().gc_loopback_left(self.handle)
        return count


class LoopbackWire(Wire):
    """One rank of a network."""

    def __init__(self, network: LoopbackNetwork, rank: int) -> None:
        """Join a network."""
        self._faulty = core().gc_faulty_wire(core().gc_loopback_wire(network.handle, rank))
        super().__init__(self._faulty, rank, network.size, LARGEST_TAG)
        self.network = network

    def damage(self, tag: int, at: int, how: str, seed: int = 0) -> None:
        """Damage a message that is sent with one of the eight tags from `tag` on: flip, cut, repeat or lose it."""
        core().gc_faulty_damage(self._faulty, at, DAMAGES[how], seed)
        core().gc_faulty_add_target(self._faulty, ANY, tag)

    @property
    def damaged_peer(self) -> int | None:
        """The rank that the damaged message went to, if there was one."""
        peer: int = core().gc_faulty_damaged_peer(self._faulty)
        return None if peer < 0 else peer


def loopback(size: int, eager: int = 0, *, delay: int = 0, seed: int = 0) -> Sequence[LoopbackWire]:
    """Return the wires of all ranks of a new network."""
    network = LoopbackNetwork(size, eager, delay, seed)
    return [LoopbackWire(network, rank) for rank in range(size)]
