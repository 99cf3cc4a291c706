"""What a communicator tells of itself: its traffic, its links, what the monitor has seen, and its rails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.transport.rails import Copies, Failover
from mpi_gpucomp.transport.rails.transport import RailsTransport

if TYPE_CHECKING:
    from mpi_gpucomp._dispatch.dispatcher import Caller
    from mpi_gpucomp.monitor.process_monitor import Alarm
    from mpi_gpucomp.monitor.trace_buffer import LinkState

__all__ = ["RailStats", "Stats", "rails_of", "stats_of"]


@dataclass(frozen=True)
class Stats:
    """What this rank has sent and received in frames, and without a codec as it is; not what MPI's own calls did."""

    bytes_sent: int
    bytes_received: int
    # What follows is known with the monitor alone; peers are ranks of the world.
    links: tuple[LinkState, ...] = ()
    """How each link to a peer is."""
    plain: int = 0
    encoded: int = 0
    """How many bytes of elements became how many encoded ones."""
    begun: int = 0
    ended: int = 0
    """Calls."""
    alarms: tuple[Alarm, ...] = ()
    """Those that this rank knows of."""

    @property
    def ratio(self) -> float:
        """Return how many bytes of elements a byte on the wire stands for, where something was encoded."""
        return self.plain / self.encoded if self.encoded else 1.0


class RailStats(NamedTuple):
    """What this rank's rails have done."""

    copies: Copies
    """How often messages were copied on their way within this rank; long ones are not."""
    failovers: list[Failover]
    """The paths that were lost, and what that cost."""
    down: list[tuple[int, str]]
    """The peers and devices without a path now, or with one that is not in use again yet."""


def stats_of(caller: Caller) -> Stats:
    """Ask the transport, and the monitor if there is one."""
    transport, monitor = caller.transport, caller.monitor
    if monitor is None:
        return Stats(transport.bytes_sent, transport.bytes_received)
    trace = monitor.trace
    trace.recorder.collect()
    return Stats(
        transport.bytes_sent,
        transport.bytes_received,
        tuple(monitor.process.links(trace)),
        trace.tally.plain,
        trace.tally.encoded,
        trace.begun,
        trace.ended,
        tuple(monitor.process.alarms.all),
    )


def rails_of(caller: Caller) -> RailStats | None:
    """Ask the rails, if there are any."""
    transport = caller.transport
    if not isinstance(transport, RailsTransport):
        return None
    return RailStats(transport.copies, transport.failovers(), transport.down())
