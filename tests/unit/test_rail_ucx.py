"""UCX under a path: what is cancelled stays cancelled, and who is believed to be alive."""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rail_pipes import End

from mpi_gpucomp.transport.rails import discovery as devices
from mpi_gpucomp.transport.rails import ucx
from mpi_gpucomp.transport.rails import ucx_endpoint as plug
from mpi_gpucomp.transport.rails.backends import RDMA, TCP, UCX, Offer, agree
from mpi_gpucomp.transport.rails.connector import MOST_CARD_BYTES, Answering, Dialling, Hello, Introducing, Refused
from mpi_gpucomp.transport.rails.frames import PING
from mpi_gpucomp.transport.rails.link import DEAD, QUIET, judge
from mpi_gpucomp.transport.rails.sequence import Key

BIG = 1 << 20


@pytest.fixture
def pair() -> list[plug.Plug]:
    if importlib.util.find_spec("ucxx") is None:
        pytest.skip("no ucxx: pip install mpi_gpucomp[ucx]")
    device = next((name for name in devices.addresses() if name != "lo"), None)
    if device is None:
        pytest.skip("no network device besides the loopback")
    one, two = plug.Plug(device, "tcp"), plug.Plug(device, "tcp")
    one.connect(two.card)
    two.connect(one.card)
    return [one, two]


def until(ready: Callable[[], bool], *plugs: plug.Plug) -> None:
    deadline = time.monotonic() + 20
    while not ready():
        for one in plugs:
            one.move()
        assert time.monotonic() < deadline, "it does not come to an end"


@pytest.mark.parametrize("steps", [0, 10, 40, 100])
@pytest.mark.parametrize("receiver_first", [False, True])
def test_what_is_cut_is_quiet(pair: list[plug.Plug], steps: int, receiver_first: bool) -> None:
    """Cut in the middle of messages: UCX lets go of all memory at both ends."""
    one, two = pair
    rooms = [bytearray(BIG) for _ in range(8)]
    sent = [one.send(os.urandom(BIG), payload=True) for _ in rooms]
    coming = [two.receive(room, payload=True) for room in rooms]
    for _ in range(steps):
        one._worker.progress_once()
        two._worker.progress_once()
    for end in (two, one) if receiver_first else (one, two):
        end.cut()
        until(end.is_quiet)
    assert all(some.request.completed for some in (*sent, *coming))


def test_an_endpoint_that_has_failed_can_be_given_up(pair: list[plug.Plug]) -> None:
    one, two = pair
    pair.clear()
    waiting = [two.receive(bytearray(40), payload=False) for _ in range(16)]
    one.send(b"x" * 40, payload=False)
    until(waiting[0].over, one, two)
    one.cut()
    until(one.is_quiet)
    del one  # and its connections with it
    until(lambda: not two._endpoint.alive, two)
    with pytest.raises(plug.PlugError, match=r"UCX: .* connection reset by remote peer"):
        two.check()
    two.cut()
    until(two.is_quiet)
    with pytest.raises(plug.PlugError, match="cancel"):
        waiting[-1].over()


def test_what_does_not_know_the_tag_is_not_heard(pair: list[plug.Plug]) -> None:
    one, two = pair
    one._theirs ^= 1 << 40
    room = bytearray(4)
    coming, lost = two.receive(room, payload=False), one.send(b"evil", payload=False)
    until(lost.over, one, two)
    one._theirs ^= 1 << 40
    one.send(b"good", payload=False)
    until(coming.over, one, two)
    assert room == b"good"


@pytest.fixture
def path() -> Iterator[tuple[ucx.UcxPath, socket.socket]]:
    """Return a path whose UCX says nothing, and the other end of the connection beside it."""
    silent: Any = SimpleNamespace(receive=lambda memory, payload: None)
    loop: Any = SimpleNamespace(watch=lambda *_: None, to_flush=lambda _: None, forget=lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        near.setblocking(False)
        yield ucx.UcxPath(Key(0, 1), near, silent, devices.find("lo", 0), End(0, [[0]], slow=False).link, loop), far


@pytest.mark.parametrize("answers", [False, True])
def test_a_process_that_answers_must_answer_over_ucx_too(
    path: tuple[ucx.UcxPath, socket.socket], answers: bool
) -> None:
    """One that stands still has its kernel's word; one that runs, and is silent on UCX, is not reached by it."""
    one, far = path
    for _ in range(ucx.MOST_ANSWERS):
        time.sleep(0.002)
        one.asked = time.monotonic()
        one.urge(PING)
        assert far.recv(10) == ucx.QUESTION
        while one.heard(time.monotonic()) < one.asked:  # the kernels need a moment
            pass
        if answers:
            far.sendall(ucx.ANSWER)
            time.sleep(0.005)
            one._hear_beside(True, False)
    late = one.asked + 1
    assert judge(late, one.heard(late), one.asked, 1.0, busy=True) == (DEAD if answers else QUIET)


def test_cards_are_exchanged_after_the_proofs() -> None:
    secret, made = os.urandom(32), list[str]()
    caller = Introducing(Dialling(secret, Hello(0, 1, 0, 1)), lambda: made.append("caller") or b"card of the caller")
    called = Introducing(Answering(secret, 1, 0), lambda: made.append("called") or b"the other card")
    answer = called.take(caller.first)
    assert made == []
    proof = caller.take(answer)
    assert made == ["caller"] and not caller.done
    said = called.take(proof[: called.wants])
    for talk, data in ((called, proof[32:]), (caller, said)):
        talk.take(data[:4])
        assert talk.wants == len(data) - 4
        talk.take(data[4:])
    assert caller.done and called.done and (caller.theirs, called.theirs) == (b"the other card", b"card of the caller")


@pytest.mark.parametrize("length", [0, MOST_CARD_BYTES + 1])
def test_a_card_of_no_length_is_refused(length: int) -> None:
    secret = os.urandom(32)
    caller, called = Dialling(secret, Hello(0, 1, 0, 1)), Introducing(Answering(secret, 1, 0), lambda: b"card")
    called.take(caller.take(called.take(caller.first)))
    with pytest.raises(Refused, match=f"a card of {length} bytes"):
        called.take(length.to_bytes(4, "little"))


def test_ranks_agree_on_the_wire() -> None:
    def kinds(*offers: Offer) -> list[str]:
        return agree(offers, 0)

    sockets = Offer("tcp", False, "not asked for", (False, False))
    both, one, none = (Offer("auto", True, "1.21.0", rdma) for rdma in ((True, True), (True, False), (False, False)))
    assert kinds(sockets, sockets) == [TCP, TCP]
    assert kinds(both, both) == [RDMA, RDMA] and kinds(both, one) == [RDMA, TCP] and kinds(none, both) == [TCP, TCP]
    assert kinds(both, both._replace(version="1.20.1")) == [TCP, TCP]
    assert kinds(both, both._replace(has_ucx=False)) == [TCP, TCP]
    assert kinds(one._replace(wire="ucx"), both._replace(wire="ucx")) == [RDMA, UCX]
