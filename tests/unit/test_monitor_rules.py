"""The rules by which a link, a coder and calls are found slow: true ones are found, clean streams raise nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import MS, feed, stream

from mpi_gpucomp.monitor.links import Durations, LinkStats, RateWindow
from mpi_gpucomp.trace import DECODE


def known_link() -> tuple[LinkStats, int]:
    """Return a link that has sent 100 chunks of 1 MiB in 8 ms each, and the time of its last."""
    link = LinkStats(1)
    feed(link, stream(begin=0, each=8 * MS, count=100))
    return link, 800 * MS


def test_a_link_has_the_bandwidth_of_its_window() -> None:
    link, now = known_link()
    assert link.sent == 100 << 20 and link.count == 100
    assert link.recent == pytest.approx((1 << 20) / 8e-3, rel=1e-6)
    assert link.mean == pytest.approx(link.recent, rel=1e-6)
    assert not link.is_slow(now) and not link.is_quiet(now)


def test_what_a_buffer_takes_at_once_is_as_fast_as_the_wire_empties_it() -> None:
    link = LinkStats(1)
    feed(link, stream(begin=0, each=5 * MS, idle=3 * MS, count=100))
    assert link.recent == pytest.approx((1 << 20) / 8e-3, rel=0.05)


def test_all_posted_at_once_is_as_fast_as_one_after_the_other() -> None:
    link = LinkStats(1)
    feed(link, stream(begin=0, each=8 * MS, count=100, ahead=100))
    assert link.recent == pytest.approx((1 << 20) / 8e-3, rel=1e-6)


def test_a_link_at_a_quarter_of_its_mean_is_slow_once_it_lasts() -> None:
    link, now = known_link()
    feed(link, stream(begin=now, each=32 * MS, count=30))
    assert not link.is_slow(link.since + 200 * MS)
    assert link.is_slow(link.since + 300 * MS)
    assert link.before == pytest.approx((1 << 20) / 8e-3, rel=0.1)


def test_it_recovers_at_three_quarters_of_what_it_was() -> None:
    link, now = known_link()
    feed(link, stream(begin=now, each=32 * MS, count=30))
    now += 30 * 32 * MS
    feed(link, stream(begin=now, each=13 * MS, count=20))  # 0.62 of the mean: better, and not well
    assert link.since
    now += 20 * 13 * MS
    feed(link, stream(begin=now, each=9 * MS, count=20))
    assert not link.since


def test_a_link_with_nothing_to_send_is_not_slow() -> None:
    link, now = known_link()
    feed(link, stream(begin=now, each=8 * MS, idle=60 * MS, count=40))
    assert not link.since


def test_another_sort_of_calls_is_compared_with_its_own_mean() -> None:
    link, now = known_link()
    feed(link, stream(begin=now, each=32 * MS, count=40, sort=1))
    assert not link.since


def test_what_first_went_into_empty_buffers_is_no_measure() -> None:
    link, now = LinkStats(1), 0
    link.extend(stream(begin=now, each=2 * MS, count=40))
    for _ in range(20):
        now = link.last
        link.extend(stream(begin=now, each=8 * MS, count=8))
        assert not link.since
    assert link.mean == pytest.approx((1 << 20) / 8e-3, rel=0.25)


def test_a_link_that_will_not_get_better_has_a_new_mean() -> None:
    link, now = known_link()
    feed(link, stream(begin=now, each=32 * MS, count=2500))
    assert not link.since
    assert link.mean == pytest.approx((1 << 20) / 32e-3, rel=0.1)


def test_a_link_that_stops_is_quiet() -> None:
    link, now = known_link()
    assert not link.is_quiet(now + 200 * MS)
    assert link.is_quiet(now + 300 * MS)


@settings(deadline=None, max_examples=60)
@given(
    each=st.integers(MS // 10, 50 * MS),
    noise=st.lists(st.floats(0.6, 1.6), min_size=300, max_size=300),
    batch=st.integers(1, 40),
    ahead=st.integers(1, 8),
)
def test_a_clean_stream_raises_nothing(each: int, noise: list[float], batch: int, ahead: int) -> None:
    link = LinkStats(1)
    records = stream(begin=0, each=each, count=300, ahead=ahead)
    records["complete"] = np.cumsum(np.array(noise) * each).astype(np.int64)
    records["post"] = np.maximum(0, records["complete"] - each * ahead)
    for start in range(0, 300, batch):
        some = records[start : start + batch]
        link.extend(some)
        assert not link.is_slow(int(some["complete"][-1]))


def coded(begin: int, each: int, count: int) -> np.ndarray:
    records = stream(begin=begin, each=each, count=count, ahead=1)
    records["kind"], records["plain"] = DECODE, 4 << 20
    return records


def test_a_coder_at_a_third_of_its_pace_is_slow_even_if_it_has_little_to_do() -> None:
    pace = RateWindow()
    for start in range(0, 60, 5):
        pace.extend(coded(start * 20 * MS, 10 * MS, 5))
        assert pace.share == 1.0
    pace.extend(coded(2000 * MS, 30 * MS, 8))
    assert pace.share == pytest.approx(1 / 3, rel=0.05)
    pace.extend(coded(4000 * MS, 10 * MS, 8))
    assert pace.share == 1.0


def test_three_calls_that_take_over_twice_as_long_are_slow() -> None:
    calls = Durations()
    for _ in range(10):
        calls.complete(100 * MS, 0)
    calls.complete(250 * MS, 0)
    calls.complete(100 * MS, 0)
    calls.complete(250 * MS, 0)
    calls.complete(250 * MS, 0)
    assert not calls.slow
    calls.complete(250 * MS, 0)
    assert calls.slow
    calls.complete(110 * MS, 0)
    assert not calls.slow
    calls.complete(900 * MS, 1)
    assert not calls.slow
