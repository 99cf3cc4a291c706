"""What auto decides for a message, given figures made by hand."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from mpi_gpucomp.codec.auto import Auto, Coding, Costs
from mpi_gpucomp.collectives.select import Figures, Link
from mpi_gpucomp.comm.calibrate import Calibration
from mpi_gpucomp.comm.forms import FORMS, Place
from mpi_gpucomp.comm.tuning import Tuner

MEGABYTE = 1 << 20
GIGABIT = 8e-9
"""Seconds per byte."""


def tuner(wire: float, own: float) -> Tuner:
    """Know a link of so many seconds per byte, on which MPI's own broadcast to 4 ranks takes so many."""
    coding = {("none", "uint8"): Coding(0.2e-9, 0.2e-9), ("split", "float32"): Coding(0.6e-9, 0.5e-9)}
    costs = Costs(wire, coding, sample=0.0)
    figures = Figures(Link(50e-6, wire), ((MEGABYTE, own * MEGABYTE), (64 * MEGABYTE, own * 64 * MEGABYTE)))
    made = Tuner(MPI.COMM_SELF, lambda method, buffers: None)
    made._known["broadcast"] = Calibration("broadcast", 4, figures, costs)
    made.codec = Auto(costs)
    return made


def form(values: np.ndarray):
    return FORMS["Bcast"](Place("Bcast", 0, 1), values)


WEIGHTS = np.random.default_rng(0).normal(0, 0.02, 16 * MEGABYTE // 4).astype(np.float32)
NOISE = np.random.default_rng(0).integers(0, 1 << 32, 16 * MEGABYTE // 4, np.uint32).view(np.float32)


@pytest.mark.parametrize("blocking", [True, False])
def test_shared_memory_is_mpis_own(blocking):
    decision = tuner(wire=0.2e-9, own=0.2e-9).decide(form(WEIGHTS), WEIGHTS.nbytes, blocking=blocking)
    assert decision.algorithm is None


@pytest.mark.parametrize("values", [WEIGHTS, NOISE], ids=["weights", "noise"])
def test_a_schedule_that_is_faster_anyway_needs_no_sample(values):
    decision = tuner(GIGABIT, own=3 * GIGABIT).decide(form(values), values.nbytes, blocking=False)
    assert decision.algorithm == "chain"


def test_where_the_data_tip_the_scale_they_are_looked_at():
    near = tuner(GIGABIT, own=1.03 * GIGABIT)
    encoded = near.decide(form(WEIGHTS), WEIGHTS.nbytes, blocking=True)
    assert encoded.algorithm is not None and encoded.encoded
    assert near.decide(form(NOISE), NOISE.nbytes, blocking=True).algorithm is None


def test_a_call_that_may_not_wait_takes_mpis_own_in_doubt():
    near = tuner(GIGABIT, own=1.03 * GIGABIT)
    assert near.decide(form(WEIGHTS), WEIGHTS.nbytes, blocking=False).algorithm is None
