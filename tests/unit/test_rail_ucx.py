"""Paths over UCX: cancellation, bytes of the wire, and liveness of the peer."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.transport.rails import discovery, loop, ucx
from mpi_gpucomp.transport.rails.backends import RDMA, TCP, UCX, Capabilities, agree
from mpi_gpucomp.transport.rails.connector import (
    MAX_ADDRESS_BYTES,
    AddressExchange,
    HandshakeError,
    Hello,
    InitiatorHandshake,
    ResponderHandshake,
)
from mpi_gpucomp.transport.rails.ucx import CREDITS, MAX_REPLIES, MESSAGE_BYTES, UcxBridge

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
    sent = [one.send(os.urandom(BIG), control=False) for _ in buffers]
    receives = [two.receive(buffer, control=False) for buffer in buffers]
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
    waiting = [two.receive(bytearray(40), control=True) for _ in range(16)]
    one.send(b"x" * 40, control=True)
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
    received, lost = two.receive(buffer, control=True), one.send(b"evil", control=True)
    until(lost.done, one, two)
    one._peer_tag ^= 1 << 40
    one.send(b"good", control=True)
    until(received.done, one, two)
    assert buffer == b"good"


class BridgePair:
    """Two bridges in one event loop, and what each has reported."""

    def __init__(self, endpoints: list[ucx.UcxEndpoint], timeout: float = 0.2) -> None:
        self.loop = loop.acquire()
        self.signs, self.reasons, self.closed = [0, 0], ["", ""], [False, False]
        with socket.create_server(("127.0.0.1", 0)) as server:
            sides = [socket.create_connection(server.getsockname()), server.accept()[0]]
        with self.loop.lock:
            self.bridges = [self._make(end, endpoints[end], sides[end], timeout) for end in (0, 1)]
        self.wires = [one.wire_socket for one in self.bridges]
        endpoints.clear()  # the bridges own them

    def _make(self, end: int, endpoint: ucx.UcxEndpoint, side_channel: socket.socket, timeout: float) -> UcxBridge:
        def on_life() -> None:
            self.signs[end] += 1

        def on_broken(reason: str) -> None:
            self.reasons[end] = reason
            self.wires[end].close()

        def on_closed() -> None:
            self.closed[end] = True

        side_channel.setblocking(False)
        return UcxBridge(
            endpoint, side_channel, self.loop, timeout, on_life=on_life, on_broken=on_broken, on_closed=on_closed
        )

    def wait(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not ready():
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.002)

    def stop(self) -> None:
        with self.loop.lock:
            for one in (*self.wires, *self.bridges):
                one.close()
        self.wait(lambda: all(self.closed))
        loop.release(self.loop)


@pytest.fixture
def bridges(pair: list[ucx.UcxEndpoint]) -> Iterator[BridgePair]:
    made = BridgePair(pair)
    yield made
    made.stop()


def received(wire: socket.socket, count: int) -> bytes:
    wire.settimeout(20)
    found = bytearray()
    while len(found) < count:
        found += wire.recv(count - len(found))
    return bytes(found)


def test_bytes_pass_both_ways_in_order(bridges: BridgePair) -> None:
    data = [os.urandom(5 * BIG + 3), os.urandom(3 * BIG + 1)]
    with ThreadPoolExecutor(4) as threads:
        for wire, sent in zip(bridges.wires, data, strict=True):
            threads.submit(wire.sendall, sent)
        lengths = [len(sent) for sent in reversed(data)]
        found = list(threads.map(received, bridges.wires, lengths))
    assert found == data[::-1] and bridges.reasons == ["", ""]
    assert min(bridges.signs) > 0


def test_a_wire_that_does_not_read_stops_the_sender(bridges: BridgePair) -> None:
    """Both ends keep a bounded number of bytes, and nothing is lost when the wire reads again."""
    wire, sent = bridges.wires[0], 0
    data = os.urandom(16 * BIG)
    wire.setblocking(False)
    quiet_since = time.monotonic()
    while time.monotonic() < quiet_since + 0.5:  # more than the timeout
        try:
            sent += wire.send(data[sent : sent + MESSAGE_BYTES])
            quiet_since = time.monotonic()
        except BlockingIOError:
            time.sleep(0.005)
    assert CREDITS * MESSAGE_BYTES <= sent < 4 * CREDITS * MESSAGE_BYTES
    assert bridges.reasons == ["", ""]
    assert received(bridges.wires[1], sent) == data[:sent]


def test_a_closed_wire_closes_both_bridges(bridges: BridgePair) -> None:
    bridges.wires[0].close()
    bridges.wait(lambda: all(bridges.closed))
    assert bridges.reasons[0] == "" and bridges.reasons[1]  # UCX or the side channel may notice it first


def test_a_wire_closes_while_credits_are_exhausted(bridges: BridgePair) -> None:
    first = bridges.bridges[0]
    bridges.wires[0].setblocking(False)
    while first._can_send:
        try:
            bridges.wires[0].send(bytes(MESSAGE_BYTES))
        except BlockingIOError:
            time.sleep(0.001)
    bridges.wires[0].close()
    bridges.wait(lambda: all(bridges.closed))


def test_a_broken_side_channel_breaks_the_path(bridges: BridgePair) -> None:
    with bridges.loop.lock:
        bridges.bridges[0]._side_channel.shutdown(socket.SHUT_RDWR)
    bridges.wait(lambda: all(bridges.closed))
    assert bridges.reasons == ["closed by the peer"] * 2


@pytest.mark.parametrize("replies", [False, True])
def test_a_process_that_replies_must_also_reply_over_ucx(bridges: BridgePair, replies: bool) -> None:
    """The kernel vouches for a hung process; one that replies on the side channel only is not reached by UCX."""
    second = bridges.bridges[1]
    with bridges.loop.lock:
        bridges.loop.unregister(second._endpoint)
        second._progress = lambda: None  # its UCX is silent from now on
        if not replies:
            bridges.loop.unregister(second._side_channel)
    before = bridges.signs[0]
    bridges.wires[0].send(b"x")
    if replies:
        bridges.wait(lambda: all(bridges.closed))
        assert bridges.reasons[0] == "UCX delivers nothing, while the peer replies on its socket"
    else:
        bridges.wait(lambda: bridges.signs[0] >= before + MAX_REPLIES)
        assert bridges.reasons == ["", ""]


def test_a_silent_network_breaks_the_path(bridges: BridgePair) -> None:
    first, second = bridges.bridges
    with bridges.loop.lock:
        bridges.loop.unregister(second._endpoint)
        second._progress = lambda: None
        first._probe_acked = lambda: False
    bridges.wires[0].send(b"x")
    bridges.wait(lambda: all(bridges.closed))
    assert re.fullmatch(r"no sign of life for \d\.\d\d s", bridges.reasons[0])


def test_an_idle_bridge_has_no_timer(bridges: BridgePair) -> None:
    bridges.wires[0].sendall(b"x")
    assert received(bridges.wires[1], 1) == b"x"
    bridges.wait(lambda: not bridges.loop._timers)


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


def test_ucx_has_one_socket_for_each_peer() -> None:
    expected = "rank 3: stripes of rails: expected 1 with UCX, got 2. Set stripes=1, or wire='tcp'."
    with pytest.raises(SpecError, match=f"^{re.escape(expected)}$"):
        discovery._check_stripes([TCP, RDMA], 2, 3)
    discovery._check_stripes([TCP, TCP], 2, 3)
    discovery._check_stripes([UCX, RDMA], 1, 3)


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
