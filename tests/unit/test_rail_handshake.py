"""The handshake of rails: both ends prove that they know the job's secret."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_gpucomp.transport.rails.connector import HandshakeError, Hello, InitiatorHandshake, ResponderHandshake

SECRET, OTHER = bytes(range(32)), bytes(32)
HELLO = Hello(initiator=1, responder=2, path=0, generation=7)


def make_responder(secret: bytes = SECRET) -> ResponderHandshake:
    return ResponderHandshake(secret, rank=2, rail=0)


def test_both_ends_authenticate() -> None:
    initiator, responder = InitiatorHandshake(SECRET, HELLO), make_responder()
    assert len(initiator.first) == responder.needs
    answer = responder.feed(initiator.first)
    assert len(answer) == initiator.needs and not responder.done
    proof = initiator.feed(answer)
    assert initiator.done and len(proof) == responder.needs
    assert responder.feed(proof) == b"" and responder.done
    assert responder.hello == initiator.hello == HELLO


def test_a_wrong_secret_is_rejected() -> None:
    initiator, responder = InitiatorHandshake(OTHER, HELLO), make_responder()
    answer = responder.feed(initiator.first)
    with pytest.raises(HandshakeError, match="the responder does not know the job's secret"):
        initiator.feed(answer)
    with pytest.raises(HandshakeError, match="the initiator does not know the job's secret"):
        responder.feed(bytes(32))
    assert not responder.done and not initiator.done


def test_a_proof_cannot_be_replayed() -> None:
    initiator, responder = InitiatorHandshake(SECRET, HELLO), make_responder()
    proof = initiator.feed(responder.feed(initiator.first))
    again = make_responder()
    again.feed(initiator.first)
    with pytest.raises(HandshakeError):
        again.feed(proof)


def test_an_answer_cannot_be_reflected_as_a_proof() -> None:
    """The two proofs have different roles."""
    responder = make_responder()
    answer = responder.feed(InitiatorHandshake(SECRET, HELLO).first)
    with pytest.raises(HandshakeError):
        responder.feed(answer[32:])


@pytest.mark.parametrize("wrong", [{"responder": 1}, {"path": 1}, {"initiator": 2}])
def test_a_hello_for_another_rank_or_rail_is_rejected(wrong: dict[str, int]) -> None:
    hello = HELLO._replace(**wrong)
    with pytest.raises(HandshakeError) as error:
        make_responder().feed(InitiatorHandshake(SECRET, hello).first)
    assert str(error.value) == f"a hello for another rank or rail: {hello}"


@given(st.binary(min_size=64, max_size=64))
def test_random_bytes_are_rejected(data: bytes) -> None:
    responder = make_responder()
    with pytest.raises(HandshakeError):
        responder.feed(data)


@given(st.data())
def test_every_bit_of_the_answer_is_checked(data: st.DataObject) -> None:
    initiator, responder = InitiatorHandshake(SECRET, HELLO), make_responder()
    answer = bytearray(responder.feed(initiator.first))
    bit = data.draw(st.integers(0, len(answer) * 8 - 1))
    answer[bit // 8] ^= 1 << bit % 8
    with pytest.raises(HandshakeError):
        initiator.feed(bytes(answer))
