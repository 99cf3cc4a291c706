"""Who may join the rails: those that know the job's secret, at both ends, once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_gpucomp.transport.rails.connector import Answering, Dialling, Hello, Refused

SECRET, OTHER = bytes(range(32)), bytes(32)
HELLO = Hello(caller=1, called=2, rail=0, generation=7)


def answering(secret: bytes = SECRET) -> Answering:
    return Answering(secret, rank=2, rail=0)


def test_both_ends_know_each_other() -> None:
    caller, called = Dialling(SECRET, HELLO), answering()
    assert len(caller.first) == called.wants
    answer = called.take(caller.first)
    assert len(answer) == caller.wants and not called.done
    proof = caller.take(answer)
    assert caller.done and len(proof) == called.wants
    assert called.take(proof) == b"" and called.done
    assert called.hello == caller.hello == HELLO


def test_a_stranger_that_calls_is_refused() -> None:
    caller, called = Dialling(OTHER, HELLO), answering()
    answer = called.take(caller.first)
    with pytest.raises(Refused, match="whoever answers does not know the job's secret"):
        caller.take(answer)
    with pytest.raises(Refused, match="whoever calls does not know the job's secret"):
        called.take(bytes(32))
    assert not called.done and not caller.done


def test_a_proof_is_good_for_one_connection_alone() -> None:
    caller, called = Dialling(SECRET, HELLO), answering()
    proof = caller.take(called.take(caller.first))
    again = answering()
    again.take(caller.first)
    with pytest.raises(Refused):
        again.take(proof)


def test_an_answer_does_not_serve_as_a_proof() -> None:
    """Whoever sends back what it was sent proves nothing."""
    called = answering()
    answer = called.take(Dialling(SECRET, HELLO).first)
    with pytest.raises(Refused):
        called.take(answer[32:])


@pytest.mark.parametrize("wrong", [{"called": 1}, {"rail": 1}, {"caller": 2}])
def test_a_hello_for_somebody_else_is_refused(wrong: dict[str, int]) -> None:
    hello = HELLO._replace(**wrong)
    with pytest.raises(Refused) as error:
        answering().take(Dialling(SECRET, hello).first)
    assert str(error.value) == f"a hello for somebody else: {hello}"


@given(st.binary(min_size=64, max_size=64))
def test_garbage_is_no_hello(data: bytes) -> None:
    called = answering()
    with pytest.raises(Refused):
        called.take(data)


@given(st.data())
def test_every_bit_of_what_is_said_counts(data: st.DataObject) -> None:
    caller, called = Dialling(SECRET, HELLO), answering()
    answer = bytearray(called.take(caller.first))
    bit = data.draw(st.integers(0, len(answer) * 8 - 1))
    answer[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Refused):
        caller.take(bytes(answer))
