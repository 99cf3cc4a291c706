"""What `codec="auto"` does with a message: MPI's own collective, or which schedule, and whether it is encoded.

All ranks must decide alike. So they decide by numbers that they have measured and agreed on together, and by the length
of the message. Only where its compressibility would tip the scale does each rank that has data take a sample, and they
agree on the worst. Measuring takes all ranks, so it is done by the first blocking call of each collective, or by
`Communicator.tune`; until then a call that is only started is MPI's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mpi4py import MPI

from mpi_gpucomp.codec.auto import CANDIDATES, GENERAL, Auto
from mpi_gpucomp.comm.calibrate import calibrate
from mpi_gpucomp.device import get_device, order_after
from mpi_gpucomp.schedule.goal import COLLECTIVES

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.comm.calibrate import Calibration
    from mpi_gpucomp.comm.forms import Form

__all__ = ["METHODS", "OWN", "Decision", "Tuner"]

OPTIMISTIC = 8.0
"""A ratio beyond what to hope for."""
TYPICAL = {"float16": 1.2, "bfloat16": 1.45, "float32": 1.15, "float64": 1.1}
"""Ratios of `split` on weights and gradients."""
METHODS = {
    "broadcast": ("Bcast", (1,)),
    "reduce": ("Reduce", (1, 1)),
    "allreduce": ("Allreduce", (1, 1)),
    "allgather": ("Allgather", (0, 1)),
    "reduce_scatter": ("Reduce_scatter_block", (1, 0)),
    "alltoall": ("Alltoall", (1, 1)),
    "gather": ("Gather", (0, 1)),
    "scatter": ("Scatter", (1, 0)),
}
"""The method of each collective, and which of its buffers are whole (1) or one rank's share (0)."""


class Decision(NamedTuple):
    """What to do; no algorithm: MPI's own."""

    algorithm: str | None
    chunk: int = 0
    encoded: bool = False


OWN = Decision(None)


class Tuner:
    """The decisions of one communicator."""

    def __init__(self, comm: MPI.Intracomm, run: Callable[[str, tuple[object, ...]], object]) -> None:
        """Measure on `comm`; `run` carries out a method with the engine's first algorithm and no codec."""
        self._comm, self._run = comm, run
        self._known: dict[str, Calibration] = {}
        self.codec = Auto()

    def knows(self, collective: str) -> bool:
        """Say whether a collective has been measured."""
        return collective in self._known

    def measure(self, collective: str, device: str) -> None:
        """Measure a collective: all ranks do, and nothing else meanwhile."""
        before = next(iter(self._known.values()), None)
        found = calibrate(self._comm, collective, lambda nbytes: self._try(collective, nbytes), device, before)
        self._known[collective] = found
        if before is None:
            self.codec = Auto(found.costs)

    def _try(self, collective: str, nbytes: int) -> None:
        """Run a collective through the engine, on buffers of which the longest has so many bytes."""
        method, whole = METHODS[collective]
        share = max(1, nbytes // 4 // self._comm.size)
        buffers = tuple(np.ones(share * (self._comm.size if one else 1), np.float32) for one in whole)
        self._run(method, buffers)

    def decide(self, form: Form, nbytes: int, *, blocking: bool) -> Decision:
        """Decide for a message of so many bytes; a call that may not wait takes no sample."""
        known, dtype = self._known[form.collective], form.some.buffer.dtype
        candidates = [codec.name for codec in CANDIDATES.get(dtype.name, GENERAL)]
        raw = known.choose(nbytes, dtype)
        if raw.algorithm is not None:
            # Whether a chunk is encoded is decided by what is in it; a sum waits for that, so there it must be likely.
            ratio = TYPICAL.get(dtype.name, 1.0) if COLLECTIVES[form.collective].reduces else OPTIMISTIC
            encoded = any(known.choose(nbytes, dtype, name, ratio).encoded for name in candidates)
            return Decision(raw.algorithm, raw.chunk, encoded)
        if not blocking or not any(known.choose(nbytes, dtype, name, OPTIMISTIC).algorithm for name in candidates):
            return OWN
        best = known.choose(nbytes, dtype, *self._sampled(form))
        return Decision(best.algorithm, best.chunk, best.encoded)

    def _sampled(self, form: Form) -> tuple[str, float]:
        """Agree on a codec and its ratio: the worst of all ranks that have data."""
        names = [codec.name for codec in CANDIDATES.get(form.some.buffer.dtype.name, GENERAL)]
        numbers = np.full(2, np.inf)
        if form.sent is not None and (not _from_root(form) or self._comm.rank == form.root):
            sample = self._own_sample(form)
            numbers[:] = round(sample[1], 2), names.index(sample[0]) if sample[0] in names else -1.0
        self._comm.Allreduce(MPI.IN_PLACE, numbers, MPI.MIN)
        ratio, number = numbers
        return (names[int(number)], float(ratio)) if np.isfinite(ratio) and number >= 0 else ("none", 1.0)

    def _own_sample(self, form: Form) -> tuple[str, float]:
        """Look at this rank's data, where they lie in one piece."""
        assert form.sent is not None
        buffer = form.sent.buffer
        if not buffer.contiguous:
            return "none", 1.0
        stream = get_device(buffer.device).stream()
        order_after(buffer, stream)
        found = self.codec.sample(buffer, stream).result()
        stream.close()
        return found.codec.name, found.ratio


def _from_root(form: Form) -> bool:
    return COLLECTIVES[form.collective].rooted and form.collective in ("broadcast", "scatter")
