"""Races: candidates that calls rotate through, and the winner."""

from __future__ import annotations

import pytest

from mpi_gpucomp._tuning.tuner import Race


def run(race: Race[str], costs: dict[str, list[float]]) -> list[str]:
    """Use candidates at their costs until one is left; return those that were used."""
    used: list[str] = []
    while True:
        race.advance(lambda numbers: numbers)
        if race.decided:
            return used
        used.append(race.current)
        race.record(costs[race.current].pop(0))


def test_a_single_candidate_wins_at_once():
    race = Race(["only"])
    race.record(3.0)
    race.advance(pytest.fail)
    assert race.decided and race.current == "only"


def test_slow_candidates_are_dropped_and_the_best_median_wins():
    costs = {
        "a": [2.0, 2.0],
        "hopeless": [9.0],
        "b": [2.9, 0.98, 0.98, 0.5, 1.3, 0.98, 0.5, 1.3],
        "c": [0.98, 0.9, 0.9, 2.0, 0.9, 0.9, 0.9, 2.0],
    }
    race = Race(list(costs))
    assert run(race, costs) == ["a", "hopeless", "b", "c"] + ["a", "b", "c"] + ["b", "c"] * 6
    assert race.current == "c", "by its median: neither a lucky round counts, nor the first"


def test_short_calls_are_raced_for_more_rounds():
    costs = {"a": [0.95] * 10, "unlucky": [3.5, 2.5, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9], "slow": [3.7, 2.8, 2.8]}
    race = Race(list(costs), short=True)
    used = run(race, costs)
    assert race.current == "unlucky" and len(used) == 23


def test_the_slowest_rank_counts():
    race = Race(["here", "there"])
    for _ in range(8):
        for cost in (1.0, 1.1):
            race.advance(lambda numbers: [1.2, 1.1])
            race.record(cost)
    race.advance(lambda numbers: [1.2, 1.1])
    assert race.decided and race.current == "there"


def test_the_position_is_what_ranks_compare():
    race = Race(["a", "b"])
    assert race.position == "race round 0, candidate 0"
    race.record(1.0)
    assert race.position == "race round 0, candidate 1"
