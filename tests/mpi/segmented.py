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
from ctypes import byref, c_int64
from pathlib import Path

from mpi4py import MPI

from mpi_gpucomp import config
from mpi_gpucomp._dispatch import runtime
from mpi_gpucomp.core.library import core
from mpi_gpucomp.transport import mpi

SEGMENT_BYTES = 1000
wires: list[int] = []


def made(*args: object) -> int:
    wires.append(_make(*args))
    return wires[-1]


_make, core().gc_mpi_wire = core().gc_mpi_wire, made
runtime.processor_name = lambda: f"node{MPI.COMM_WORLD.rank}"  # type: ignore[assignment]
mpi.MAX_SEGMENTS, config.MIN_SEGMENT_BYTES = 64, 2 * 64 + 1
mpi.SLOW = math.inf
os.environ |= {"MPI_GPUCOMP_WIRE": "mpi", "MPI_GPUCOMP_SEGMENT_BYTES": str(SEGMENT_BYTES)}
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(__file__).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
segmented = relayed = 0
for wire in wires:
    counts = c_int64(), c_int64()
    core().gc_mpi_counts(wire, byref(counts[0]), byref(counts[1]))
    segmented, relayed = segmented + counts[0].value, relayed + counts[1].value
assert segmented, "no message was segmented"
assert any(MPI.COMM_WORLD.allgather(relayed)) or MPI.COMM_WORLD.size < 3, "no message was relayed"
