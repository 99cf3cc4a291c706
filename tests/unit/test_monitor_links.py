"""Slow links, codecs and calls are found; clean streams raise nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import MS, feed, stream

from mpi_gpucomp.monitor.links import CallDurations, CodecRate, LinkStats
from mpi_gpucomp.trace import DECODE


def known_link() -> tuple[LinkStats, int]:
    """Return a link that has sent 100 chunks of 1 MiB in 8 ms each, and the time of its last."""
    link = LinkStats(1)
    feed(link, stream(begin=0, each=8 * MS, count=100))
    return link, 800 * MS


def test_bandwidth_of_a_window() -> None:
    link, now = known_link()
    assert link.nbytes == 100 << 20 and link.chunks == 100
    assert link.recent == pytest.approx((1 << 20) / 8e-3, rel=1e-6)
    assert link.mean == pytest.approx(link.recent, rel=1e-6)
    assert not link.is_slow(now) and not link.is_stuck(now)


def test_gaps_in_which_a_socket_buffer_drains_count() -> None:
    link = LinkStats(1)
    feed(link, stream(begin=0, each=5 * MS, idle=3 * MS, count=100))
    assert link.recent == pytest.approx((1 << 20) / 8e-3, rel=0.05)


def test_bandwidth_does_not_depend_on_posting_ahead() -> None:
    link = LinkStats(1)
    feed(link, stream(begin=0, each=8 * MS, count=100, ahead=100))
    assert link.recent == pytest.approx((1 << 20) / 8e-3, rel=1e-6)


def test_link_at_a_quarter_of_its_mean_is_slow_once_it_lasts() -> None:
    link, now = known_link()
    feed(link, stream(begin=now, each=32 * MS, count=30))
    assert not link.is_slow(link.slow_since + 200 * MS)
    assert link.is_slow(link.slow_since + 300 * MS)
    assert link.before == pytest.approx((1 << 20) / 8e-3, rel=0.1)


def test_link_recovers_at_three_quarters_of_its_mean() -> None:
    link, now = known_link()
    feed(link, stream(begin=now, each=32 * MS, count=30))
    now += 30 * 32 * MS
    feed(link, stream(begin=now, each=13 * MS, count=20))  # 0.62 of the mean: better, but not recovered
    assert link.slow_since
    now += 20 * 13 * MS
    feed(link, stream(begin=now, each=9 * MS, count=20))
    assert not link.slow_since


def test_link_with_nothing_to_send_is_not_slow() -> None:
    link, now = known_link()
    feed(link, stream(begin=now, each=8 * MS, idle=60 * MS, count=40))
    assert not link.slow_since


def test_each_class_of_calls_has_its_own_mean() -> None:
    link, now = known_link()
    feed(link, stream(begin=now, each=32 * MS, count=40, call_class=1))
    assert not link.slow_since


def test_sends_into_empty_buffers_do_not_set_the_mean() -> None:
    link, now = LinkStats(1), 0
    link.extend(stream(begin=now, each=2 * MS, count=40))
    for _ in range(20):
        now = link.last
        link.extend(stream(begin=now, each=8 * MS, count=8))
        assert not link.slow_since
    assert link.mean == pytest.approx((1 << 20) / 8e-3, rel=0.25)


def test_persistent_bandwidth_becomes_the_mean() -> None:
    link, now = known_link()
    feed(link, stream(begin=now, each=32 * MS, count=2500))
    assert not link.slow_since
    assert link.mean == pytest.approx((1 << 20) / 32e-3, rel=0.1)


def test_a_link_that_stops_is_stuck() -> None:
    link, now = known_link()
    assert not link.is_stuck(now + 200 * MS)
    assert link.is_stuck(now + 300 * MS)


@settings(deadline=None, max_examples=60)
@given(
    each=st.integers(MS // 10, 50 * MS),
    noise=st.lists(st.floats(0.6, 1.6), min_size=300, max_size=300),
    batch=st.integers(1, 40),
    ahead=st.integers(1, 8),
)
def test_clean_stream_is_not_slow(each: int, noise: list[float], batch: int, ahead: int) -> None:
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
    records["kind"], records["raw_bytes"] = DECODE, 4 << 20
    return records


def test_codec_at_a_third_of_its_rate_is_slow() -> None:
    codec = CodecRate()
    for start in range(0, 60, 5):
        codec.extend(coded(start * 20 * MS, 10 * MS, 5))
        assert codec.share == 1.0
    codec.extend(coded(2000 * MS, 30 * MS, 8))
    assert codec.share == pytest.approx(1 / 3, rel=0.05)
    codec.extend(coded(4000 * MS, 10 * MS, 8))
    assert codec.share == 1.0


def test_three_calls_over_twice_their_mean_are_slow() -> None:
    calls = CallDurations()
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


def test_link_whose_bandwidth_always_varies_is_rarely_slow() -> None:
    """Busy processors limit it: without its own deviation it would be slow in two windows of five."""
    link, now, rng = LinkStats(1), 0, np.random.default_rng(0)
    slow = 0
    for _ in range(400):
        link.extend(stream(begin=now, each=int(8 * MS * rng.choice((0.5, 1, 1, 2, 4))), count=8))
        now = link.last
        slow += link.is_slow(now)
    assert slow < 20


def test_steady_link_is_slow_after_two_windows() -> None:
    link, now = known_link()
    link.extend(stream(begin=now, each=20 * MS, count=8))
    link.extend(stream(begin=link.last, each=20 * MS, count=16))
    assert link.is_slow(link.last)
