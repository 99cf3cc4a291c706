"""What auto decides for a message, given figures made by hand."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from mpi_gpucomp._call.calls import FORMS, Place
from mpi_gpucomp._tuning.measure import Calibration
from mpi_gpucomp._tuning.model import Figures, LinkCost
from mpi_gpucomp._tuning.tuner import CALLS_PER_SAMPLE, EVER, Tuner
from mpi_gpucomp.codec.auto import Auto, CodecSpeed, Costs

MEGABYTE = 1 << 20
GIGABIT = 8e-9
"""Seconds per byte."""


def nothing(*_):
    """Stand for what takes other ranks."""


def tuner(wire: float, own: float) -> Tuner:
    """Know a link of so many seconds per byte, on which MPI's own broadcast to 4 ranks takes so many."""
    coding = {("none", "uint8"): CodecSpeed(0.2e-9, 0.2e-9), ("split", "float32"): CodecSpeed(0.6e-9, 0.5e-9)}
    costs = Costs(wire, coding, sample=0.0)
    figures = Figures(LinkCost(50e-6, wire), ((MEGABYTE, own * MEGABYTE), (64 * MEGABYTE, own * 64 * MEGABYTE)))
    made = Tuner(MPI.COMM_SELF, ((0,),), nothing, nothing, nothing, nothing)
    made._known = {name: Calibration(name, 4, figures, costs) for name in ("broadcast", "allreduce")}
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
    decision = tuner(GIGABIT, own=1.1 * GIGABIT).decide(form(WEIGHTS), WEIGHTS.nbytes, blocking=True)
    assert decision.algorithm is not None and decision.codec.name == "split"
    assert tuner(GIGABIT, own=1.1 * GIGABIT).decide(form(NOISE), NOISE.nbytes, blocking=True).algorithm is None


def test_what_a_sample_has_shown_holds_for_the_next_calls_of_its_kind():
    """To agree on one takes all ranks as long as a short message does."""
    near = tuner(GIGABIT, own=1.1 * GIGABIT)
    assert near.decide(form(NOISE), NOISE.nbytes, blocking=True).algorithm is None
    decisions = [near.decide(form(WEIGHTS), WEIGHTS.nbytes, blocking=True).algorithm for _ in range(CALLS_PER_SAMPLE)]
    assert decisions[:-1] == [None] * (CALLS_PER_SAMPLE - 1) and decisions[-1] is not None


def test_a_call_that_may_not_wait_takes_mpis_own_in_doubt():
    near = tuner(GIGABIT, own=1.03 * GIGABIT)
    assert near.decide(form(WEIGHTS), WEIGHTS.nbytes, blocking=False).algorithm is None


def test_ways_that_may_be_the_fastest_take_turns():
    near = tuner(GIGABIT, own=1.1 * GIGABIT)
    taken = []
    for _ in range(30):
        decision = near.decide(form(WEIGHTS), WEIGHTS.nbytes, blocking=True)
        taken.append(decision)
        if decision.trial is None:
            break
        decision.trial.note(1.0 if decision.algorithm is None else 2.0)
    first, *others, last = taken
    assert first.codec.name == "split", "what the model expects comes first"
    assert {(way.algorithm, way.codec.name) for way in others} == {
        ("chain", "split"),
        ("chain", "none"),
        (None, "none"),
    }
    assert (last.algorithm, last.trial) == (None, None), "and what was the fastest stays"
    assert near.decide(form(WEIGHTS), WEIGHTS.nbytes + 4, blocking=True).algorithm is None, "for such lengths"
    assert near.decide(form(WEIGHTS[: 1 << 20]), 4 << 20, blocking=True).trial is not None, "but not for others"


@pytest.mark.parametrize(("wire", "lasts"), [(0.2e-9, True), (GIGABIT, False)], ids=["memory", "gigabit"])
def test_what_was_the_fastest_lasts_where_no_data_could_change_it_else_as_long_as_a_sample(wire, lasts):
    """Calls that need not be asked about any more cost microseconds less."""
    known = tuner(wire, own=wire)
    for _ in range(30):
        decision = known.decide(form(WEIGHTS), WEIGHTS.nbytes, blocking=True)
        if decision.trial is None:
            break
        assert not decision.lasting
        decision.trial.note(1.0 if decision.algorithm is None else 2.0)
    assert decision.algorithm is None and decision.lasting is not None
    assert decision.lasting.left == EVER if lasts else decision.lasting.left < CALLS_PER_SAMPLE
    left = decision.lasting.left
    again = known.decide(form(WEIGHTS), WEIGHTS.nbytes, blocking=True)
    assert again.lasting is not None and again.lasting.left == (EVER if lasts else (left - 1) % CALLS_PER_SAMPLE)


def test_sums_go_by_the_model_until_they_are_settled():
    """Else the same program might add up in one order in its first calls, and in another later."""
    known = tuner(GIGABIT, own=GIGABIT)
    values = WEIGHTS.copy()
    call = FORMS["Allreduce"](Place("Allreduce", 0, 1), values, np.empty_like(values), MPI.SUM)
    by_model = [known.decide(call, values.nbytes, blocking=True) for _ in range(3)]
    assert [decision.trial for decision in by_model] == [None] * 3
    known.settling = True
    while (decision := known.decide(call, values.nbytes, blocking=True)).trial is not None:
        decision.trial.note(2.0 if decision[:3] == by_model[0][:3] else 1.0)
    known.settling = False
    settled = known.decide(call, values.nbytes, blocking=True)
    assert settled[:3] == decision[:3] != by_model[0][:3]
