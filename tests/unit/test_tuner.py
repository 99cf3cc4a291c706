"""The tuner's plans, given measurements made by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp._call.calls import Call, parse_call
from mpi_gpucomp._dispatch.plan import FOREVER, Plan, Route
from mpi_gpucomp._tuning import measure
from mpi_gpucomp._tuning.measure import Calibration, _relay_bytes, codec_speeds
from mpi_gpucomp._tuning.model import LinkCost, Measurements
from mpi_gpucomp._tuning.tuner import CALLS_PER_SAMPLE, Tuner
from mpi_gpucomp.codec.auto import Auto, CodecSpeed, Costs
from mpi_gpucomp.device import Device, dtype_of_name
from mpi_gpucomp.schedule.cost import default_chunk_bytes
from mpi_gpucomp.transport.mpi import SLOW

MEGABYTE = 1 << 20
GIGABIT = 8e-9
"""Seconds per byte."""


@pytest.fixture
def tuner() -> Iterator[Callable[..., Tuner]]:
    with Communicator(MPI.COMM_SELF, monitor=False) as comm:

        def make(wire: float, native: float) -> Tuner:
            """Make a tuner that has measured a link and native broadcasts to 4 ranks, both in seconds per byte."""
            coding = {("none", "uint8"): CodecSpeed(0.2e-9, 0.2e-9), ("split", "float32"): CodecSpeed(0.6e-9, 0.5e-9)}
            costs = Costs(wire, coding, sample=0.0)
            sizes = (MEGABYTE, native * MEGABYTE), (64 * MEGABYTE, native * 64 * MEGABYTE)
            measured = Measurements(LinkCost(50e-6, wire), sizes)
            made = Tuner(comm._runtime)
            made._calibrations = {name: Calibration(name, 4, measured, costs) for name in ("broadcast", "allreduce")}
            made.codec = Auto(costs)
            return made

        yield make


def bcast(values: np.ndarray, *, blocking: bool = True) -> Call:
    return parse_call("Bcast", (values,), {}, 0, 1, blocking=blocking)


def name_of(plan: Plan) -> str | None:
    return plan.algorithm.name if plan.algorithm else None


def what(plan: Plan) -> tuple[Any, ...]:
    return name_of(plan), plan.codec and plan.codec.spec, plan.chunk_bytes


WEIGHTS = np.random.default_rng(0).normal(0, 0.02, 16 * MEGABYTE // 4).astype(np.float32)
NOISE = np.random.default_rng(0).integers(0, 1 << 32, 16 * MEGABYTE // 4, np.uint32).view(np.float32)


@pytest.mark.parametrize("blocking", [True, False])
def test_messages_in_shared_memory_are_passed_through(tuner, blocking):
    assert tuner(wire=0.2e-9, native=0.2e-9).plan(bcast(WEIGHTS, blocking=blocking)).route is Route.PASSTHROUGH


@pytest.mark.parametrize("values", [WEIGHTS, NOISE], ids=["weights", "noise"])
def test_a_schedule_that_is_faster_with_any_data_needs_no_sample(tuner, values):
    plan = tuner(GIGABIT, native=3 * GIGABIT).plan(bcast(values, blocking=False))
    assert (plan.route, name_of(plan)) == (Route.ENGINE, "chain")


def test_data_are_sampled_where_their_compressibility_decides(tuner):
    plan = tuner(GIGABIT, native=1.1 * GIGABIT).plan(bcast(WEIGHTS))
    assert plan.route is Route.ENGINE and plan.codec.name == "split"
    assert tuner(GIGABIT, native=1.1 * GIGABIT).plan(bcast(NOISE)).route is Route.PASSTHROUGH


def test_a_sample_holds_for_the_next_calls_of_its_class(tuner):
    """To agree on one takes all ranks as long as a short message does."""
    near = tuner(GIGABIT, native=1.1 * GIGABIT)
    assert near.plan(bcast(NOISE)).route is Route.PASSTHROUGH
    routes = [near.plan(bcast(WEIGHTS)).route for _ in range(CALLS_PER_SAMPLE)]
    assert routes == [Route.PASSTHROUGH] * (CALLS_PER_SAMPLE - 1) + [Route.ENGINE]


def test_a_nonblocking_call_is_passed_through_in_doubt(tuner):
    assert tuner(GIGABIT, native=1.03 * GIGABIT).plan(bcast(WEIGHTS, blocking=False)).route is Route.PASSTHROUGH


def test_calls_rotate_through_the_candidates_until_one_wins(tuner):
    near = tuner(GIGABIT, native=1.1 * GIGABIT)
    plans = []
    for _ in range(30):
        plan = near.plan(bcast(WEIGHTS))
        plans.append(plan)
        if plan.race is None:
            break
        near.observe(plan, bcast(WEIGHTS), 1.0 if plan.route is Route.PASSTHROUGH else 2.0)
    first, *others, last = plans
    assert first.codec.name == "split", "the model's prediction comes first"
    assert {(name_of(plan), plan.codec.name) for plan in others} == {
        ("chain", "split"),
        ("chain", "none"),
        (None, "auto"),
    }
    assert (last.route, last.race) == (Route.PASSTHROUGH, None), "the winner stays"
    assert near.plan(bcast(np.append(WEIGHTS, WEIGHTS[:1]))).route is Route.PASSTHROUGH, "for messages of this class"
    assert near.plan(bcast(WEIGHTS[: 1 << 20])).race is not None, "and no others"


def test_explaining_a_call_starts_no_race(tuner):
    near = tuner(GIGABIT, native=1.1 * GIGABIT)
    plan = near.plan(bcast(WEIGHTS), explore=False)
    assert plan.race is None and plan.codec.name == "split" and plan.why == "auto, predicted by the model"


@pytest.mark.parametrize(("wire", "forever"), [(0.2e-9, True), (GIGABIT, False)], ids=["memory", "gigabit"])
def test_the_winner_lasts_forever_if_no_data_could_change_it_else_as_long_as_a_sample(tuner, wire, forever):
    """Calls with a lifetime bypass dispatch."""
    known = tuner(wire, native=wire)
    for _ in range(30):
        plan = known.plan(bcast(WEIGHTS))
        if plan.race is None:
            break
        assert plan.lifetime is None
        known.observe(plan, bcast(WEIGHTS), 1.0 if plan.route is Route.PASSTHROUGH else 2.0)
    assert plan.route is Route.PASSTHROUGH and plan.lifetime is not None
    assert plan.lifetime.ttl == FOREVER if forever else plan.lifetime.ttl < CALLS_PER_SAMPLE
    ttl = plan.lifetime.ttl
    again = known.plan(bcast(WEIGHTS)).lifetime
    assert again is not None and again.ttl == (FOREVER if forever else (ttl - 1) % CALLS_PER_SAMPLE)


def test_reductions_follow_the_model_until_they_are_autotuned(tuner):
    """Otherwise a program might sum in one order in its first calls, and in another later."""
    known = tuner(GIGABIT, native=GIGABIT)
    values = WEIGHTS.copy()
    call = parse_call("Allreduce", (values, np.empty_like(values), MPI.SUM), {}, 0, 1)
    by_model = [known.plan(call) for _ in range(3)]
    assert [plan.race for plan in by_model] == [None] * 3
    known.racing_reductions = True
    while (plan := known.plan(call)).race is not None:
        known.observe(plan, call, 2.0 if what(plan) == what(by_model[0]) else 1.0)
    known.racing_reductions = False
    tuned = known.plan(call)
    assert what(tuned) == what(plan) != what(by_model[0])


class OnSlowLinks:
    """A wire that relays as MPI's does."""

    def relays(self, bytes_per_second):
        return bytes_per_second <= SLOW


def test_relays_are_expected_between_hosts_on_slow_links():
    apart, together = ((0,), (1,), (2,)), ((0, 1), (2,))
    slow, fast = LinkCost(50e-6, GIGABIT), LinkCost(50e-6, GIGABIT / 5)
    found = [
        _relay_bytes(nodes, OnSlowLinks(), link) for nodes, link in ((apart, slow), (apart, fast), (together, slow))
    ]
    assert found == [1 << 16, 0, 0]


def test_codecs_are_timed_on_the_gpu_with_the_chunk_of_long_messages(
    gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []

    def code_seconds(codec: Any, source: Any, stream: Any) -> tuple[float, float]:
        timed.append((source.device, stream.device, source.nbytes))
        return 1.0, 1.0

    monkeypatch.setattr(measure, "_code_seconds", code_seconds)
    codec_speeds.__wrapped__(gpu.name)
    assert set(timed) == {(gpu.name, gpu, default_chunk_bytes(1 << 30, coded=True, gpu=True))}


def test_plans_follow_the_costs_on_gpus_and_let_each_rank_decide(tuner):
    """Host and GPU would decide differently; the plan is one for all ranks."""
    known = tuner(wire=GIGABIT, native=2 * GIGABIT)
    found = known._calibrations["broadcast"]
    slow = {key: CodecSpeed(10 * GIGABIT, 10 * GIGABIT) for key in found.costs.coding}
    dtype = dtype_of_name("float32")
    assert found.best(16 * MEGABYTE, dtype, "split", 4.0).encoded
    slow_on_gpus = replace(found, gpu_costs=Costs(GIGABIT, slow, sample=0.0))
    assert not slow_on_gpus.best(16 * MEGABYTE, dtype, "split", 4.0).encoded
    fast_on_gpus = replace(found, gpu_costs=found.costs)
    assert fast_on_gpus.best(16 * MEGABYTE, dtype, "split", 4.0).encoded
    known._calibrations["broadcast"] = fast_on_gpus
    assert known.plan(bcast(WEIGHTS)).codec is known.codec
