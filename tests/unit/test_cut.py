"""How messages are cut, and how a wire is found to be slow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpi_gpucomp.transport import segmented as cut
from mpi_gpucomp.transport.segmented import MOST, SEGMENT_BYTES, LinkRate, Segmentation


@given(st.integers(2 * MOST + 1, 1 << 20), st.integers(0, 1 << 32))
def test_pieces_follow_each_other_and_the_first_says_how_many(piece, nbytes):
    made = Segmentation(piece)
    first = made.first(nbytes)
    rest = list(made.rest(first, nbytes))
    assert 0 <= first <= min(nbytes, piece)
    assert len(rest) == made.following(first) == max(0, first - made.whole)
    starts, ends = [start for start, _ in rest], [end for _, end in rest]
    assert starts == [first, *ends][: len(rest)], "each begins where the one before it ends"
    assert ([first, *ends])[-1] == nbytes
    assert all(end - start == piece for start, end in rest[:-1])
    assert not rest or ends[-1] - starts[-1] >= 0
    assert len(rest) == MOST or all(end - start <= piece for start, end in rest), "only a very long one ends long"


def test_one_more_piece_where_the_last_is_full():
    made = Segmentation(SEGMENT_BYTES)
    assert made.whole == 61184
    assert [made.first(nbytes) for nbytes in (0, 61184, 61185, 61184 + 65281, 61184 + 65282)] == [
        *(0, 61184, 61185),
        *(61185, 61186),
    ]
    assert list(made.rest(61186, 200_000)) == [(61186, 126466), (126466, 200_000)]


def test_what_is_longer_than_a_piece_has_come_whole():
    made = Segmentation(SEGMENT_BYTES)
    assert list(made.rest(SEGMENT_BYTES + 1, SEGMENT_BYTES + 1)) == []
    assert len(list(made.rest(SEGMENT_BYTES, 1 << 30))) == MOST


def test_a_wire_is_slow_if_the_usual_message_is(monkeypatch):
    now = 100.0
    monkeypatch.setattr(cut, "perf_counter", lambda: now)
    pace = LinkRate()

    def send(seconds, nbytes=1_000_000):
        nonlocal now
        end = pace.begin(nbytes)
        now += seconds
        end()

    assert pace.slow(), "nobody knows yet"
    for _ in range(7):
        send(0.001)
    assert pace.slow()
    send(0.001)
    assert not pace.slow(), "1 GB/s"
    for _ in range(4):
        send(0.1)
    assert not pace.slow(), "some wait for their receiver"
    for _ in range(2):
        send(0.01)
    assert pace.slow(), "100 MB/s"


def test_messages_under_way_together_share_the_wire(monkeypatch):
    now = 0.0
    monkeypatch.setattr(cut, "perf_counter", lambda: now)
    pace = LinkRate()
    ends = [pace.begin(1_000_000) for _ in range(8)]
    for end in ends:
        now += 0.004
        end()
    assert not pace.slow(), "250 MB/s, one behind the other"
