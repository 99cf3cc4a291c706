"""The program of `osu_bench failover` on each host: one operation in a loop, verified each time.

    python -m osu_bench.experiments.failover_ranks OPERATION BYTES RAILS TIMEOUT LIMIT WIRE STOP

OPERATION is bcast, allreduce or send; RAILS are devices, or `native` for native MPI. Rank 0 prints a line of JSON for
each operation: start and end by the machine's clock, and the number of wrong elements. When the file STOP exists, the
loop ends, and every rank prints its failovers or its error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator, GpucompError
from mpi_gpucomp.transport.rails import Rails

__all__ = ["main"]

GRACE_SECONDS = 3.0
"""Seconds that a failed rank waits before it exits, because the launcher then ends ranks that still have to report."""


def _report(**fields: Any) -> None:
    os.write(1, (json.dumps(fields) + "\n").encode())  # one atomic write, unbuffered


class _Work:
    """The buffers of an operation and its expected result."""

    def __init__(self, comm: Any, operation: str, nbytes: int) -> None:
        self.comm, self.operation = comm, operation
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        count = nbytes // 4
        self.base = np.random.default_rng(1).integers(0, 1000, count).astype(np.float32)
        self.sent, self.received = self.base.copy(), np.zeros(count, np.float32)

    def run(self, turn: int) -> int:
        """Run it once; return this rank's number of wrong elements."""
        self.sent[:] = self.base
        self.sent[:: 1 << 12] += turn % 1000 + self.rank
        self.received.fill(-1)
        return int(getattr(self, f"_{self.operation}")(turn))

    def _wrong(self, got: np.ndarray, turn: int, marks: float) -> int:
        expected = self.base.copy()
        expected[:: 1 << 12] += turn % 1000 + marks
        return int((got != expected).sum())

    def _bcast(self, turn: int) -> int:
        self.comm.Bcast(self.sent, 0)
        return self._wrong(self.sent, turn, 0)

    def _allreduce(self, turn: int) -> int:
        self.comm.Allreduce(self.sent, self.received)
        self.received /= self.size
        return self._wrong(self.received, turn, (self.size - 1) / 2)

    def _send(self, turn: int) -> int:
        if self.rank == 0:
            self.comm.Send(self.sent, 1, 7)
        elif self.rank == 1:
            self.comm.Recv(self.received, 0, 7)
            return self._wrong(self.received, turn, 0)
        return 0


def main(arguments: list[str]) -> int:
    """Run until the stop file exists or an error occurs."""
    operation, nbytes, devices, timeout, limit, wire, stop = arguments
    world = MPI.COMM_WORLD
    on_rails = devices != "native"
    try:
        rails = Rails(devices, float(timeout), float(limit), wire) if on_rails else ""
        comm: Any = Communicator(world, codec="none", rails=rails) if on_rails else world
        turns = _turns(_Work(comm, operation, int(nbytes)), Path(stop))
        if on_rails:
            stats = comm.rail_stats()
            lost = [tuple(one) for one in stats.failovers]
            _report(rank=world.rank, failovers=lost, copies=stats.copies, turns=turns)
            comm.Free()
    except GpucompError as error:
        _report(rank=world.rank, error=f"{type(error).__name__}: {error}", at=time.monotonic())
        time.sleep(GRACE_SECONDS)
        os._exit(3)  # MPI_Finalize might wait for a network that is down
    return 0


def _turns(work: _Work, stop: Path) -> int:
    """Run the loop; ranks sum their wrong elements and agree when to stop."""
    turn = 0
    note, sums = np.zeros(3), np.zeros(3)
    stats = getattr(work.comm, "rail_stats", lambda: None)
    while True:
        start = time.monotonic()
        wrong = work.run(turn)
        end = time.monotonic()
        rails = stats()
        note[:] = wrong, work.rank == 0 and stop.exists(), len(rails.down) if rails else 0
        work.comm.Allreduce(note, sums)
        turn += 1
        if work.rank == 0:
            _report(turn=turn, start=start, end=end, all=time.monotonic(), wrong=int(sums[0]), missing=int(sums[2]))
        if sums[1]:
            return turn


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
