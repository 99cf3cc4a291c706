"""Control messages: round trips, and arbitrary bytes, which are an error that names the peer or a valid message."""

from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_gpucomp.engine import control_messages
from mpi_gpucomp.engine.control_messages import (
    MAX_TEXT_BYTES,
    VERSION,
    Abort,
    ControlMessage,
    DeadlockFound,
    DeadlockQuery,
    DeadlockReply,
    EnvelopeMessage,
    FailureReport,
    Join,
    ObserverMessage,
    RankWait,
    Wait,
    clip,
    decode,
    encode,
)
from mpi_gpucomp.errors import ControlMessageError

NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)
TEXTS = st.text(st.characters(codec=None), max_size=40)
MESSAGES: st.SearchStrategy[ControlMessage] = st.one_of(
    st.builds(Join, TEXTS, NUMBERS, TEXTS, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.builds(
        FailureReport,
        *(TEXTS, NUMBERS, st.booleans(), st.none() | TEXTS, st.none() | TEXTS, TEXTS),
        *(st.dictionaries(NUMBERS, NUMBERS), st.none() | NUMBERS),
    ),
    st.builds(Abort, TEXTS),
    st.builds(DeadlockQuery, NUMBERS),
    st.builds(
        DeadlockReply,
        NUMBERS,
        st.lists(st.builds(Wait, TEXTS, NUMBERS, TEXTS)).map(tuple),
        st.dictionaries(TEXTS, NUMBERS),
    ),
    st.builds(DeadlockFound, TEXTS, st.lists(st.builds(RankWait, NUMBERS, TEXTS, NUMBERS)).map(tuple)),
    st.builds(ObserverMessage, TEXTS, NUMBERS, TEXTS),
    st.builds(EnvelopeMessage, NUMBERS, st.binary(max_size=100)),
)


def decode_or_error(data: bytes) -> ControlMessage | None:
    """Return the message, or None after an error in the usual form, and nothing else."""
    try:
        return decode(data, 3, 5)
    except ControlMessageError as error:
        assert re.fullmatch(r"rank 5: control message( \w+)? from rank 3: expected .+, got .+\. .+", str(error))
        return None


@given(MESSAGES)
def test_messages_round_trip(message: ControlMessage) -> None:
    found = decode(encode(message), 3, 5)
    assert found == message and type(found) is type(message)
    assert [type(one) for one in found] == [type(one) for one in message]


@given(MESSAGES, st.data())
def test_every_truncation_is_an_error(message: ControlMessage, data: st.DataObject) -> None:
    whole = encode(message)
    assert decode_or_error(whole[: data.draw(st.integers(0, len(whole) - 1))]) is None
    assert decode_or_error(whole + b"\0") is None


@given(MESSAGES, st.data())
def test_a_truncated_body_with_a_matching_length_is_an_error(message: ControlMessage, data: st.DataObject) -> None:
    body = encode(message)[8:]
    body = body[: data.draw(st.integers(0, len(body) - 1))]
    kind = encode(message)[:4]
    assert decode_or_error(kind + len(body).to_bytes(4, "little") + body) is None


@given(MESSAGES, st.data())
def test_a_flipped_bit_is_an_error_or_another_message(message: ControlMessage, data: st.DataObject) -> None:
    flipped = bytearray(encode(message))
    bit = data.draw(st.integers(0, len(flipped) * 8 - 1))
    flipped[bit // 8] ^= 1 << bit % 8
    found = decode_or_error(bytes(flipped))
    assert found is None or found != message
    assert found is None or bit >= 24, "magic and version are checked"


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_an_error(data: bytes) -> None:
    assert decode_or_error(data) is None or data.startswith(b"GC" + bytes([VERSION]))


@given(st.integers(1, 8), st.binary(max_size=200))
def test_arbitrary_bodies_are_an_error_or_a_message(kind: int, body: bytes) -> None:
    found = decode_or_error(b"GC" + bytes([VERSION, kind]) + len(body).to_bytes(4, "little") + body)
    assert found is None or encode(found)[8:] == body


def test_pickled_bytes_are_not_read() -> None:
    with pytest.raises(ControlMessageError) as error:
        decode(pickle.dumps(("join", 1)), 3, 5)
    assert str(error.value) == (
        r"rank 5: control message from rank 3: expected the magic bytes b'GC', got b'\x80\x04'. "
        "Install the same version of mpi_gpucomp on every rank."
    )


def test_counts_are_bounded_before_anything_is_allocated() -> None:
    header = b"GC" + bytes([VERSION, 6]) + (8).to_bytes(4, "little")
    with pytest.raises(ControlMessageError, match="expected at most 262144 items, got 4294967295"):
        decode(header + bytes(4) + b"\xff" * 4, 3, 5)
    with pytest.raises(ControlMessageError, match="expected a field of at most 1048576 bytes, got 4294967295"):
        decode(header + b"\xff" * 4 + bytes(4), 3, 5)


def test_messages_that_are_too_long_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ControlMessageError) as error:
        encode(Abort("x" * (MAX_TEXT_BYTES + 1)))
    assert str(error.value) == (
        "control message Abort: expected at most 1048576 bytes, got 1048577. Use shorter names, or fewer of them."
    )
    with pytest.raises(ControlMessageError, match="expected integers of 64 bits"):
        encode(DeadlockQuery(1 << 63))
    monkeypatch.setattr(control_messages, "MAX_BYTES", 10)
    with pytest.raises(ControlMessageError, match="expected at most 10 bytes, got 12"):
        encode(Abort("12345678"))


def test_long_error_texts_are_shortened() -> None:
    assert clip("short") == "short"
    assert clip("x" * 20_000) == "x" * 16384 + " ..."
