"""Run under mpirun: calls that the monitor records."""

from __future__ import annotations

import sys
import time
import traceback

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp._dispatch.runtime import _clocks
from mpi_gpucomp.communicator import Stats

WORLD = MPI.COMM_WORLD
LAST = WORLD.size - 1


def work() -> None:
    """Make a few calls, and compare what the monitor counts with what the transport does."""
    values = np.zeros(1 << 21, np.float32)
    with Communicator(WORLD, "split", monitor=True) as comm, Communicator(WORLD, "split", monitor=False) as other:
        for _ in range(3):
            comm.Bcast(values)
            other.Bcast(values)
        stats, unseen = comm.stats(), other.stats()
        counted = {link.peer: link.nbytes for link in stats.links}
        assert sum(counted.values()) == stats.bytes_sent
        assert list(counted) == ([WORLD.rank + 1] if WORLD.rank < LAST else []), counted
        assert stats.calls_started == stats.calls_ended == 3 and not stats.alarms, stats.alarms
        assert (stats.raw_bytes, stats.ratio > 1.1) == ((3 * values.nbytes, True) if WORLD.rank == 0 else (0, False))
        assert unseen == Stats(stats.bytes_sent, stats.bytes_received, stats.wire)
        if WORLD.rank == 0:
            comm.Send(values, 3)
            assert {link.peer: link.chunks for link in comm.stats().links}[3] > 1
        elif WORLD.rank == 3:
            comm.Recv(values, 0)
        half = comm.Split(WORLD.rank % 2)
        half.Bcast(values)
        peers = [link.peer for link in half.stats().links]
        assert peers == ([WORLD.rank + 2] if WORLD.rank + 2 < WORLD.size else []), peers
        half.Free()
    offset, uncertainty = _clocks[0]
    assert abs(offset) <= uncertainty, (offset, uncertainty)  # one machine has one clock


def come_late() -> None:
    """Let the last rank join late until all ranks have the alarm."""
    values = np.zeros(1 << 18, np.float32)
    with Communicator(WORLD, "split") as comm:
        end = time.monotonic() + 40
        known = False
        while not known and time.monotonic() < end:
            if WORLD.rank == LAST:
                time.sleep(0.1)
            comm.Bcast(values)
            known = WORLD.allreduce(bool(comm.stats().alarms), MPI.LAND)
        alarms = {(alarm.kind, alarm.ranks) for alarm in comm.stats().alarms}
        assert ("imbalance", (LAST,)) in alarms, alarms


if __name__ == "__main__":
    try:
        {"work": work, "late": come_late}[sys.argv[1]]()
    except BaseException:
        traceback.print_exc()
        WORLD.Abort(1)
    print(f"rank {WORLD.rank} has completed", flush=True)
