"""Ways that are tried in turns, and which of them is left."""

from __future__ import annotations

import pytest

from mpi_gpucomp._tuning.tuner import Trial


def settle(trial: Trial[str], costs: dict[str, list[float]]) -> list[str]:
    """Take ways until one is left, each at its costs in order; return those that were taken."""
    taken: list[str] = []
    while True:
        trial.begin(lambda numbers: numbers)
        if trial.settled:
            return taken
        taken.append(trial.way)
        trial.note(costs[trial.way].pop(0))


def test_one_way_needs_no_trial():
    trial = Trial(["only"])
    trial.note(3.0)
    trial.begin(pytest.fail)
    assert trial.settled and trial.way == "only"


def test_the_slow_ones_drop_out_and_the_best_is_left():
    costs = {
        "a": [2.0, 2.0],
        "hopeless": [9.0],
        "b": [2.9, 0.98, 0.98, 0.5, 1.3, 0.98, 0.5, 1.3],
        "c": [0.98, 0.9, 0.9, 2.0, 0.9, 0.9, 0.9, 2.0],
    }
    trial = Trial(list(costs))
    assert settle(trial, costs) == ["a", "hopeless", "b", "c"] + ["a", "b", "c"] + ["b", "c"] * 6
    assert trial.way == "c", "by what it usually costs; neither a lucky call counts, nor the first"


def test_short_calls_are_tried_longer_before_they_drop_out():
    costs = {"a": [0.95] * 10, "unlucky": [3.5, 2.5, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9], "slow": [3.7, 2.8, 2.8]}
    trial = Trial(list(costs), short=True)
    taken = settle(trial, costs)
    assert trial.way == "unlucky" and len(taken) == 23


def test_the_slowest_rank_counts():
    trial = Trial(["here", "there"])
    for _ in range(8):
        for cost in (1.0, 1.1):
            trial.begin(lambda numbers: [1.2, 1.1])
            trial.note(cost)
    trial.begin(lambda numbers: [1.2, 1.1])
    assert trial.settled and trial.way == "there"


def test_ranks_compare_where_they_are():
    trial = Trial(["a", "b"])
    assert trial.place == "try 0 of round 0"
    trial.note(1.0)
    assert trial.place == "try 1 of round 0"
