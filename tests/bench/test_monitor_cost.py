"""What the monitor adds to a call: the share is found, and the interval holds it."""

from __future__ import annotations

import numpy as np

from osu_bench.experiments.monitor_cost import added


def test_what_is_added_is_found_among_noise_that_both_share() -> None:
    rng = np.random.default_rng(1)
    without = 30e-3 + rng.gamma(1.0, 10e-3, 400)
    pairs = np.stack((without, without + 0.5e-3 + rng.normal(0, 1e-3, 400)), axis=1)
    pairs[:20, 1] += 1.0  # something else took the machine
    found = added(pairs)
    assert found.low < 0.5e-3 / found.without < found.high
    assert found.low > 0 and found.high < 0.03


def test_nothing_added_is_within_the_interval() -> None:
    pairs = 30e-3 + np.random.default_rng(2).normal(0, 1e-3, (400, 2))
    found = added(pairs)
    assert found.low < 0 < found.high
