"""Segmentation of long messages, and the detection of slow links."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpi_gpucomp.transport import segmented
from mpi_gpucomp.transport.segmented import MAX_SEGMENTS, SEGMENT_BYTES, LinkRate, Segmentation


@given(st.integers(2 * MAX_SEGMENTS + 1, 1 << 20), st.integers(0, 1 << 32))
def test_segments_are_contiguous_and_the_first_encodes_their_number(segment_bytes, nbytes):
    made = Segmentation(segment_bytes)
    first = made.first(nbytes)
    rest = list(made.rest(first, nbytes))
    assert 0 <= first <= min(nbytes, segment_bytes)
    assert len(rest) == made.following(first) == max(0, first - made.max_whole)
    starts, ends = [start for start, _ in rest], [end for _, end in rest]
    assert starts == [first, *ends][: len(rest)], "each starts at the end of its predecessor"
    assert ([first, *ends])[-1] == nbytes
    assert all(end - start == segment_bytes for start, end in rest[:-1])
    assert not rest or ends[-1] - starts[-1] >= 0
    assert len(rest) == MAX_SEGMENTS or all(end - start <= segment_bytes for start, end in rest)


def test_a_full_last_segment_adds_another():
    made = Segmentation(SEGMENT_BYTES)
    assert made.max_whole == 61184
    assert [made.first(nbytes) for nbytes in (0, 61184, 61185, 61184 + 65281, 61184 + 65282)] == [
        *(0, 61184, 61185),
        *(61185, 61186),
    ]
    assert list(made.rest(61186, 200_000)) == [(61186, 126466), (126466, 200_000)]


def test_a_first_message_longer_than_a_segment_is_the_whole_message():
    made = Segmentation(SEGMENT_BYTES)
    assert list(made.rest(SEGMENT_BYTES + 1, SEGMENT_BYTES + 1)) == []
    assert len(list(made.rest(SEGMENT_BYTES, 1 << 30))) == MAX_SEGMENTS


def test_the_median_message_decides_if_a_link_is_slow(monkeypatch):
    now = 100.0
    monkeypatch.setattr(segmented, "perf_counter", lambda: now)
    rate = LinkRate()

    def send(seconds, nbytes=1_000_000):
        nonlocal now
        end = rate.begin(nbytes)
        now += seconds
        end()

    assert rate.slow(), "unknown"
    for _ in range(7):
        send(0.001)
    assert rate.slow()
    send(0.001)
    assert not rate.slow(), "1 GB/s"
    for _ in range(4):
        send(0.1)
    assert not rate.slow(), "some wait for their receiver"
    for _ in range(2):
        send(0.01)
    assert rate.slow(), "100 MB/s"


def test_messages_in_flight_together_share_the_link(monkeypatch):
    now = 0.0
    monkeypatch.setattr(segmented, "perf_counter", lambda: now)
    rate = LinkRate()
    ends = [rate.begin(1_000_000) for _ in range(8)]
    for end in ends:
        now += 0.004
        end()
    assert not rate.slow(), "250 MB/s, one after the other"
