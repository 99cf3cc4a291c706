"""Paths over UCX: cancellation, and liveness of the peer."""

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

from mpi_gpucomp.transport.rails import discovery, ucx
from mpi_gpucomp.transport.rails.backends import RDMA, TCP, UCX, Capabilities, agree
from mpi_gpucomp.transport.rails.connector import (
    MAX_ADDRESS_BYTES,
    AddressExchange,
    HandshakeError,
    Hello,
    InitiatorHandshake,
    ResponderHandshake,
)
from mpi_gpucomp.transport.rails.link import DEAD, SUSPECT, check_liveness
from mpi_gpucomp.transport.rails.sequence import PING, PathId

BIG = 1 << 20


@pytest.fixture
def pair() -> list[ucx.UcxEndpoint]:
    if importlib.util.find_spec("ucxx") is None:
        pytest.skip("no ucxx: pip install mpi_gpucomp[ucx]")
    device = next((name for name in discovery.addresses() if name != "lo"), None)
    if device is None:
        pytest.skip("no network device besides the loopback")
    one, two = ucx.UcxEndpoint(device, "tcp"), ucx.UcxEndpoint(device, "tcp")
    one.connect(two.address_blob)
    two.connect(one.address_blob)
    return [one, two]


def until(ready: Callable[[], bool], *endpoints: ucx.UcxEndpoint) -> None:
    deadline = time.monotonic() + 20
    while not ready():
        for one in endpoints:
            one.progress()
        assert time.monotonic() < deadline, "timed out"


@pytest.mark.parametrize("steps", [0, 10, 40, 100])
@pytest.mark.parametrize("receiver_first", [False, True])
def test_a_closed_endpoint_releases_its_memory(pair: list[ucx.UcxEndpoint], steps: int, receiver_first: bool) -> None:
    """Close in the middle of messages: UCX releases all memory at both ends."""
    one, two = pair
    buffers = [bytearray(BIG) for _ in range(8)]
    sent = [one.send(os.urandom(BIG), payload=True) for _ in buffers]
    receives = [two.receive(buffer, payload=True) for buffer in buffers]
    for _ in range(steps):
        one._worker.progress_once()
        two._worker.progress_once()
    for end in (two, one) if receiver_first else (one, two):
        end.close()
        until(end.poll_closed)
    assert all(some.request.completed for some in (*sent, *receives))


def test_a_failed_endpoint_can_be_closed(pair: list[ucx.UcxEndpoint]) -> None:
    one, two = pair
    pair.clear()
    waiting = [two.receive(bytearray(40), payload=False) for _ in range(16)]
    one.send(b"x" * 40, payload=False)
    until(waiting[0].done, one, two)
    one.close()
    until(one.poll_closed)
    del one  # and its connections with it
    until(lambda: not two._endpoint.alive, two)
    with pytest.raises(ucx.UcxError, match=r"UCX: .* connection reset by remote peer"):
        two.check()
    two.close()
    until(two.poll_closed)
    with pytest.raises(ucx.UcxError, match="cancel"):
        waiting[-1].done()


def test_a_message_with_a_wrong_tag_is_not_received(pair: list[ucx.UcxEndpoint]) -> None:
    one, two = pair
    one._peer_tag ^= 1 << 40
    buffer = bytearray(4)
    received, lost = two.receive(buffer, payload=False), one.send(b"evil", payload=False)
    until(lost.done, one, two)
    one._peer_tag ^= 1 << 40
    one.send(b"good", payload=False)
    until(received.done, one, two)
    assert buffer == b"good"


@pytest.fixture
def path() -> Iterator[tuple[ucx.UcxPath, socket.socket]]:
    """Return a path whose endpoint receives nothing, and the other end of its side channel."""
    silent: Any = SimpleNamespace(receive=lambda memory, payload: None)
    loop: Any = SimpleNamespace(register=lambda *_: None, schedule_flush=lambda _: None, unregister=lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with own, other:
        own.setblocking(False)
        yield (
            ucx.UcxPath(PathId(0, 1), own, silent, discovery.find_rail("lo", 0), End(0, [[0]], slow=False).link, loop),
            other,
        )


@pytest.mark.parametrize("replies", [False, True])
def test_a_process_that_replies_must_also_reply_over_ucx(
    path: tuple[ucx.UcxPath, socket.socket], replies: bool
) -> None:
    """The kernel vouches for a hung process; one that replies on the side channel only is not reached by UCX."""
    one, other = path
    for _ in range(ucx.MAX_REPLIES):
        time.sleep(0.002)
        one.probed = time.monotonic()
        one.send_urgent(PING)
        assert other.recv(10) == ucx.PROBE
        while one.last_seen(time.monotonic()) < one.probed:  # the kernels need a moment
            pass
        if replies:
            other.sendall(ucx.REPLY)
            time.sleep(0.005)
            one._on_side_channel(True, False)
    late = one.probed + 1
    assert check_liveness(late, one.last_seen(late), one.probed, 1.0, busy=True) == (DEAD if replies else SUSPECT)


def test_addresses_are_exchanged_after_authentication() -> None:
    secret, made = os.urandom(32), list[str]()
    initiator = AddressExchange(
        InitiatorHandshake(secret, Hello(0, 1, 0, 1)), lambda: made.append("initiator") or b"initiator's address"
    )
    responder = AddressExchange(
        ResponderHandshake(secret, 1, 0), lambda: made.append("responder") or b"responder's address"
    )
    answer = responder.feed(initiator.first)
    assert made == []
    proof = initiator.feed(answer)
    assert made == ["initiator"] and not initiator.done
    reply = responder.feed(proof[: responder.needs])
    for end, data in ((responder, proof[32:]), (initiator, reply)):
        end.feed(data[:4])
        assert end.needs == len(data) - 4
        end.feed(data[4:])
    assert initiator.done and responder.done
    assert (initiator.peer_address, responder.peer_address) == (b"responder's address", b"initiator's address")


@pytest.mark.parametrize("length", [0, MAX_ADDRESS_BYTES + 1])
def test_an_address_of_invalid_length_is_rejected(length: int) -> None:
    secret = os.urandom(32)
    initiator = InitiatorHandshake(secret, Hello(0, 1, 0, 1))
    responder = AddressExchange(ResponderHandshake(secret, 1, 0), lambda: b"address")
    responder.feed(initiator.feed(responder.feed(initiator.first)))
    with pytest.raises(HandshakeError, match=f"an address blob of {length} bytes"):
        responder.feed(length.to_bytes(4, "little"))


def test_ranks_agree_on_the_backend() -> None:
    def kinds(*ranks: Capabilities) -> list[str]:
        return agree(ranks, 0)

    sockets = Capabilities("tcp", False, "not requested", (False, False))
    both, one, none = (
        Capabilities("auto", True, "1.21.0", rdma) for rdma in ((True, True), (True, False), (False, False))
    )
    assert kinds(sockets, sockets) == [TCP, TCP]
    assert kinds(both, both) == [RDMA, RDMA] and kinds(both, one) == [RDMA, TCP] and kinds(none, both) == [TCP, TCP]
    assert kinds(both, both._replace(version="1.20.1")) == [TCP, TCP]
    assert kinds(both, both._replace(has_ucx=False)) == [TCP, TCP]
    assert kinds(one._replace(wire="ucx"), both._replace(wire="ucx")) == [RDMA, UCX]
