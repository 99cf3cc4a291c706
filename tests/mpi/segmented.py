"""Run another program as if every rank were on a node of its own, with slow links.

segmented.py PROGRAM [ARGUMENT ...]

All messages of more than 936 bytes are segmented and relayed, which otherwise happens between hosts only. A program
without a segmented message fails.
"""

from __future__ import annotations

import math
import os
import runpy
import sys
from pathlib import Path

from mpi4py import MPI

from mpi_gpucomp import config
from mpi_gpucomp._dispatch import runtime
from mpi_gpucomp.transport import segmented
from mpi_gpucomp.transport.segmented import SegmentedRecv, SegmentedSend

MAX_SEGMENTS, SEGMENT_BYTES = 64, 1000
relayed, sent = [], []


def relay(self, channel):  # type: ignore[no-untyped-def]
    found = _relay(self, channel)
    relayed.append(found is not None)
    return found


def of(*args):  # type: ignore[no-untyped-def]
    sent.append(True)
    return _of(*args)


_relay, SegmentedRecv.relay = SegmentedRecv.relay, relay
_of, SegmentedSend.of = SegmentedSend.of, of

runtime.processor_name = lambda: f"node{MPI.COMM_WORLD.rank}"  # type: ignore[assignment]
segmented.MAX_SEGMENTS, config.MIN_SEGMENT_BYTES = MAX_SEGMENTS, 2 * MAX_SEGMENTS + 1
segmented.SLOW = math.inf
os.environ["MPI_GPUCOMP_SEGMENT_BYTES"] = str(SEGMENT_BYTES)
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(__file__).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
assert sent, "no message was segmented"
assert any(MPI.COMM_WORLD.allgather(any(relayed))) or MPI.COMM_WORLD.size < 3, "no message was relayed"
