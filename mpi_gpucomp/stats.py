"""Statistics of a communicator: traffic, links, alarms and rails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.transport.rails import Copies, Failover
from mpi_gpucomp.transport.tcp import TcpWire

if TYPE_CHECKING:
    from mpi_gpucomp._dispatch.runtime import Runtime
    from mpi_gpucomp.monitor.process_monitor import Alarm
    from mpi_gpucomp.monitor.trace_buffer import LinkState

__all__ = ["RailStats", "Stats", "rails_of", "stats_of"]


@dataclass(frozen=True)
class Stats:
    """What this rank has sent and received through the engine; passed-through calls are not counted."""

    bytes_sent: int
    bytes_received: int
    wire: str = ""
    """What carries the messages of the engine: mpi, tcp, tcp+mpi (between and within hosts) or rails; and why."""
    # Known only with the monitor; peers are ranks of MPI.COMM_WORLD.
    links: tuple[LinkState, ...] = ()
    """The state of the link to each peer."""
    raw_bytes: int = 0
    encoded_bytes: int = 0
    """Bytes before and after encoding."""
    calls_started: int = 0
    calls_ended: int = 0
    alarms: tuple[Alarm, ...] = ()
    """Alarms that this rank knows of."""

    @property
    def ratio(self) -> float:
        """Return the compression ratio of everything that was encoded."""
        return self.raw_bytes / self.encoded_bytes if self.encoded_bytes else 1.0


class RailStats(NamedTuple):
    """Statistics of this rank's rails."""

    copies: Copies
    """Copies of messages within this rank; long messages are not copied."""
    failovers: list[Failover]
    """Paths that were lost, and the cost of each failover."""
    down: list[tuple[int, str]]
    """Peers and devices whose path is down, or up but not in use again yet."""


def stats_of(runtime: Runtime) -> Stats:
    """Return the statistics of the wire, and of the monitor if there is one."""
    wire, monitor = runtime.wire, runtime.monitor
    if monitor is None:
        return Stats(wire.bytes_sent, wire.bytes_received, wire.title)
    trace = monitor.trace
    trace.recorder.collect()
    return Stats(
        wire.bytes_sent,
        wire.bytes_received,
        wire.title,
        tuple(monitor.process.links(trace)),
        trace.counters.raw_bytes,
        trace.counters.encoded_bytes,
        trace.begun,
        trace.ended,
        tuple(monitor.process.alarms.all),
    )


def rails_of(runtime: Runtime) -> RailStats | None:
    """Return the statistics of the rails, if there are any."""
    wire = runtime.wire
    if not isinstance(wire, TcpWire):
        return None
    return RailStats(wire.copies, wire.failovers(), wire.down())
