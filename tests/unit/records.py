"""Streams of records as a rank writes them."""

from __future__ import annotations

import numpy as np

from mpi_gpucomp.monitor.trace_buffer import RECORD
from mpi_gpucomp.trace import SEND

MS = 1_000_000


def stream(
    *, begin: int, each: int, count: int, nbytes: int = 1 << 20, call_class: int = 0, idle: int = 0, ahead: int = 2
):
    """Return sends that complete `each` nanoseconds apart, with `ahead` posted at a time."""
    found = np.zeros(count, RECORD)
    found["complete"] = begin + (np.arange(count) + 1) * (each + idle)
    found["post"] = found["complete"] - each * (1 if idle else ahead)
    found["nbytes"], found["call_class"], found["kind"], found["peer"] = nbytes, call_class, SEND, 1
    found["number"] = np.arange(count) + 1
    return found


def feed(counter, records, batch: int = 5) -> None:
    """Add records in batches."""
    for start in range(0, len(records), batch):
        counter.extend(records[start : start + batch])
