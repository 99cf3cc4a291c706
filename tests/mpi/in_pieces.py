"""Run another of these programs with ranks that believe to be on nodes of their own, on a slow wire.

in_pieces.py PROGRAM [ARGUMENT ...]

So all messages of more than 936 bytes are cut, and sent on in pieces, which otherwise happens between hosts alone. A
program in which none was is a failure.
"""

from __future__ import annotations

import math
import os
import runpy
import sys
from pathlib import Path

from mpi4py import MPI

from mpi_gpucomp import config
from mpi_gpucomp._dispatch import runtime as nodes
from mpi_gpucomp.transport import segmented as cut
from mpi_gpucomp.transport.segmented import ReceivedPieces, SentPieces

MOST, PIECE = 64, 1000
relayed, cut_up = [], []


def relay(self, on):  # type: ignore[no-untyped-def]
    found = _relay(self, on)
    relayed.append(found is not None)
    return found


def of(*args):  # type: ignore[no-untyped-def]
    cut_up.append(True)
    return _of(*args)


_relay, ReceivedPieces.relay = ReceivedPieces.relay, relay
_of, SentPieces.of = SentPieces.of, of

nodes.processor = lambda: f"node{MPI.COMM_WORLD.rank}"  # type: ignore[assignment]
cut.MOST, config.MIN_SEGMENT_BYTES = MOST, 2 * MOST + 1
cut.SLOW = math.inf
os.environ["MPI_GPUCOMP_SEGMENT_BYTES"] = str(PIECE)
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(__file__).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
assert cut_up, "no message was cut"
assert any(MPI.COMM_WORLD.allgather(any(relayed))) or MPI.COMM_WORLD.size < 3, "no message was sent on in pieces"
