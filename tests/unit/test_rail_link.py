"""Links without sockets: whatever path breaks at any time, every byte arrives once, and messages in order."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rail_pipes import Pair

from mpi_gpucomp.errors import BufferSpecError
from mpi_gpucomp.transport.rails import messages as module
from mpi_gpucomp.transport.rails.link import ALIVE, DEAD, SUSPECT, check_liveness
from mpi_gpucomp.transport.rails.sequence import (
    CONTROL,
    DATA,
    AckState,
    Outgoing,
    PacketHeader,
    PathId,
    ReceiveSequence,
    SendSequence,
)

TIERS = [[[0], [1]], [[0, 1]], [[0, 1], [2]], [[0]]]


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RAIL_SEGMENT_BYTES", 16)
    monkeypatch.setattr(module, "EAGER_BYTES", 8)


ACTIONS = ["put"] * 8 + ["get"] * 8 + ["run"] * 8 + ["send"] * 3 + ["receive"] * 3
ACTIONS += ["control", "drop", "break", "connect", "finish_close"]
STEPS = 400


class Exchange:
    """The messages between two ranks, with the expected contents."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.sent: dict[tuple[int, int], list[tuple[bytes, bytearray, Any]]] = {}
        self.received: dict[tuple[int, int], list[tuple[bytearray, Any]]] = {}
        self.control: list[list[bytes]] = [[], []]
        self.random = random.Random(5)

    def send(self, side: int, tag: int, size: int) -> None:
        memory = bytearray(self.random.randbytes(size))
        transfer = self.pair.ends[side].matcher.send(1 - side, tag, memoryview(memory))
        self.sent.setdefault((side, tag), []).append((bytes(memory), memory, transfer))

    def receive(self, side: int, tag: int) -> None:
        memory = bytearray(80)
        transfer = self.pair.ends[side].matcher.receive(1 - side, tag, memoryview(memory))
        self.received.setdefault((1 - side, tag), []).append((memory, transfer))

    def send_control(self, side: int, size: int) -> None:
        text = b"%d:" % len(self.control[side]) + bytes(size)
        self.control[side].append(text)
        self.pair.ends[side].link.post(Outgoing(CONTROL, text))

    def overwrite(self) -> None:
        """Overwrite the memory of completed sends, as callers may."""
        for messages in self.sent.values():
            for data, memory, transfer in messages:
                if transfer.done():
                    memory[:] = b"\xaa" * len(data)

    def check(self, *, reconnect: bool) -> None:
        for (side, tag), messages in self.sent.items():
            while len(self.received.get((side, tag), ())) < len(messages):
                self.receive(1 - side, tag)
        self.pair.drain(reconnect=reconnect)
        for key, messages in self.sent.items():
            for (data, _, transfer), (memory, receiving) in zip(messages, self.received[key], strict=False):
                assert transfer.done() and receiving.done() and receiving.nbytes == len(data)
                assert memory == data + bytes(80 - len(data))
        for side in (0, 1):
            assert [text for _, text in self.pair.ends[1 - side].matcher.control] == self.control[side]
            assert self.pair.ends[side].link.all_acked and not self.pair.ends[side].link.busy


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("tiers", TIERS)
@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 32), reconnect=st.booleans())
def test_every_byte_arrives_once_whatever_breaks(
    tiers: list[list[int]], slow: bool, seed: int, reconnect: bool
) -> None:
    """Act in random order; finish on the remaining paths, if any, or on new ones."""
    pair, draw = Pair(tiers, slow=slow), random.Random(seed)
    exchange = Exchange(pair)
    for _ in range(STEPS):
        action, side, number, size = draw.choice(ACTIONS), draw.randrange(2), draw.randrange(3), draw.randrange(71)
        rail = number % len(pair.rails)
        path = pair.path(side, rail)
        if action == "send":
            exchange.send(side, number, size)
        elif action == "receive":
            exchange.receive(side, number)
        elif action == "control":
            exchange.send_control(side, size)
        elif action == "connect":
            pair.connect(rail)
        elif action == "finish_close" and pair.ends[side].closing:
            draw.choice(pair.ends[side].closing).finish_close()
        elif action == "run":  # so that long messages progress
            pair.run(rail, size // 8)
        elif path is not None and action == "put":
            path.put()
        elif path is not None and action == "get":
            path.get()
        elif path is not None and action == "break":  # within a packet
            path.get(share=size / 71)
        elif path is not None and action == "drop":
            pair.ends[side].link.drop_path(path, "dropped")
        exchange.overwrite()
    exchange.check(reconnect=reconnect or not pair.joined())


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("tdlr"), st.integers(0, 1)), max_size=80))
def test_sequence_numbers_keep_their_order(steps: list[tuple[str, int]]) -> None:
    """Take, deliver, lose and resume at random: each item is delivered once, in order."""
    sender: SendSequence[int] = SendSequence()
    receiver: ReceiveSequence[int] = ReceiveSequence()
    wires: list[list[int]] = [[], []]
    generation, closed, got = [1, 1], [0, 0], []
    for number in range(10):
        assert sender.post(number) == number

    def deliver(rail: int) -> None:
        if wires[rail]:
            number = wires[rail].pop(0)
            if receiver.begin(number, PathId(rail, generation[rail])):
                got.extend(receiver.finish(number, number))

    for step, rail in [*steps, ("l", 0), ("l", 1), ("r", 0), *[("t", 0), ("d", 0)] * 10]:
        if step == "t" and (taken := sender.take(PathId(rail, generation[rail]))) is not None:
            wires[rail].append(taken[0])
        elif step == "d":
            deliver(rail)
        elif step == "l":
            wires[rail].clear()
            closed[rail], generation[rail] = generation[rail], generation[rail] + 1
            receiver.drop_partial(lambda path: path.generation <= closed[path.rail])
        elif step == "r":
            state = AckState.unpack(receiver.ack_state(tuple(closed)).pack(), 2)
            assert state is not None
            sender.resume(state)
        assert sender.acked <= sender.transmitted <= sender.posted
        assert receiver.delivered <= receiver.received
    sender.ack(receiver.delivered)
    assert got == list(range(10)) and sender.all_acked


def test_duplicates_are_dropped() -> None:
    receiver: ReceiveSequence[str] = ReceiveSequence()
    path, other = PathId(0, 1), PathId(1, 1)
    assert receiver.begin(1, path) and not receiver.begin(1, other)
    assert receiver.finish(1, "b") == [] and not receiver.begin(1, other)
    assert receiver.ack_state((0, 0)) == (0, (1,), (0, 0)) and receiver.received == 2
    assert receiver.begin(0, other) and receiver.finish(0, "a") == ["a", "b"]
    assert not receiver.begin(0, path) and not receiver.begin(1, path)


def test_only_lost_packets_are_retransmitted() -> None:
    sender: SendSequence[str] = SendSequence()
    for item in "abcd":
        sender.post(item)
    path, other = PathId(0, 3), PathId(1, 1)
    assert [sender.take(where) for where in (path, other, path)] == [(0, "a"), (1, "b"), (2, "c")]
    assert sender.resume(AckState(0, (2,), (3, 0))) == []
    assert [sender.take(other) for _ in range(3)] == [(0, "a"), (3, "d"), None]
    assert sender.ack(4) == ["a", "b", "c", "d"] and sender.all_acked


def test_a_path_is_reported_only_after_it_has_closed() -> None:
    """A closing path may still write into its buffer: the sender must not have retransmitted before."""
    pair = Pair([[0], [1]], slow=True)
    memory, data = bytearray(40), bytes(range(40))
    receiving = pair.ends[1].matcher.receive(0, 4, memoryview(memory))
    pair.ends[0].matcher.send(1, 4, memoryview(data))
    sending, other = pair.path(0, 0), pair.path(1, 0)
    assert sending is not None and other is not None
    while not (sending.wire and PacketHeader.unpack(sending.wire[0][0]).kind == DATA):
        _ = other.get(), other.put(), sending.get(), sending.put()
    other.get(share=0.5)
    link = pair.ends[1].link
    assert link.in_use == [1] and link.closed == (0, 0) and link.abandoned == [1, 0]
    assert link.failovers[0].downtime is None
    pair.connect(0)
    assert link.closed == (0, 0), "a new path does not close the previous one"
    pair.drain(reconnect=False)
    assert receiving.done() and memory == data and link.closed == (1, 0)
    assert all(one.downtime is not None for end in pair.ends for one in end.link.failovers)


def test_generations_close_in_order() -> None:
    pair = Pair([[0], [1]], slow=True)
    end = pair.ends[0]
    pair.connect(0)
    pair.connect(0)
    first, second = end.closing
    second.finish_close()
    assert end.link.closed == (0, 0)
    first.finish_close()
    assert end.link.closed == (2, 0)


def test_packets_of_a_closing_path_are_kept() -> None:
    sender: SendSequence[str] = SendSequence()
    path, other = PathId(0, 1), PathId(1, 1)
    for item in "abc":
        sender.post(item)
        sender.take(path)
    sender.hold(path)
    assert sender.ack(1) == [] and sender.resume(AckState(1, (2,), (1, 0))) == [] and sender.take(other) is None
    assert sender.release(path) == ["a"]
    assert [sender.take(other) for _ in range(2)] == [(1, "b"), None] and sender.ack(3) == ["b", "c"]


def test_failback_waits_for_the_next_message() -> None:
    pair = Pair([[0], [1]])
    link = pair.ends[0].link
    assert link.in_use == [0]
    path = pair.path(0, 0)
    assert path is not None
    link.drop_path(path, "dropped")
    assert link.in_use == [1]
    pair.connect(0)
    assert link.in_use == [1]
    pair.ends[0].matcher.send(1, 3, memoryview(bytes(4)))
    assert link.in_use == [1], "not before it is stable"
    assert link.down == {0}
    link.paths[0].since -= 1.1
    assert link.in_use == [1]
    pair.ends[0].matcher.send(1, 3, memoryview(bytes(4)))
    assert link.in_use == [0] and link.down == set()
    link.drop_path(link.paths[1], "dropped")
    link.drop_path(link.paths[0], "dropped")
    assert link.in_use == []
    pair.connect(1)
    assert link.in_use == [1], "the only one"
    assert [one.rail for one in link.failovers] == [0, 1, 0]
    assert {one.reason for one in link.failovers} == {"dropped"}


def test_a_too_long_message_is_an_error_without_overflow() -> None:
    pair = Pair([[0]])
    memory = bytearray(b"\x07" * 30)
    receiving = pair.ends[1].matcher.receive(0, 4, memoryview(memory)[:20])
    pair.ends[0].matcher.send(1, 4, memoryview(bytes(25)))
    pair.drain()
    with pytest.raises(BufferSpecError) as error:
        receiving.done()
    assert str(error.value) == (
        "rank 1: message from rank 0, tag 4: expected at most 20 bytes, got 25. "
        "Pass a receive buffer as large as the message."
    )
    assert memory == b"\x07" * 30


def test_a_rank_sends_to_itself() -> None:
    matcher = Pair([[0]]).ends[0].matcher
    for size in (3, 40):
        memory = bytearray(50)
        sending = matcher.send(0, 1, memoryview(bytes(range(size))))
        assert sending.done() is (size == 3)
        assert matcher.probe_any() == 1
        receiving = matcher.receive(0, 1, memoryview(memory))
        assert sending.done() and receiving.done() and memory[:size] == bytes(range(size))
    assert matcher.probe_any() is None


def test_cancelled_receives_and_discarded_messages() -> None:
    pair = Pair([[0]])
    receiving = pair.ends[1].matcher.receive(0, 2, memoryview(bytearray(30)))
    assert receiving.cancel() and not receiving.cancel()
    sending = pair.ends[0].matcher.send(1, 2, memoryview(bytes(30)))
    pair.drain()
    assert pair.ends[1].matcher.probe_any() == 2 and not sending.done()
    assert pair.ends[1].matcher.discard(0, 3) is None
    dropped = pair.ends[1].matcher.discard(0, 2)
    assert dropped is not None and not dropped.cancel()
    pair.drain()
    assert dropped.done() and sending.done() and pair.ends[1].matcher.probe_any() is None


def test_long_messages_are_not_copied() -> None:
    pair = Pair([[0]])
    pair.ends[1].matcher.receive(0, 2, memoryview(bytearray(300)))
    pair.ends[0].matcher.send(1, 2, memoryview(bytes(300)))
    pair.drain()
    assert [end.matcher.copies for end in pair.ends] == [(0, 0), (0, 0)]
    pair.ends[0].matcher.send(1, 2, memoryview(bytes(5)))
    assert pair.ends[0].matcher.copies == (1, 5)


@pytest.mark.parametrize("size", [5, 40])
def test_transfers_report_their_rail(size: int) -> None:
    pair = Pair([[0], [1]])
    for rail in (0, 1):
        receiving = pair.ends[1].matcher.receive(0, 2, memoryview(bytearray(size)))
        sending = pair.ends[0].matcher.send(1, 2, memoryview(bytes(size)))
        pair.drain(reconnect=False)
        assert (sending.rail, receiving.rail) == (rail, rail)
        path = pair.path(0, 0)
        if path is not None:
            pair.ends[0].link.drop_path(path, "dropped")


def test_packet_headers() -> None:
    header = PacketHeader(1, 2, 3, 4, 5, 6)
    assert PacketHeader.unpack(header.pack()) == header and not header.malformed
    assert header._replace(kind=0).malformed and header._replace(kind=11).malformed
    assert header._replace(length=(1 << 30) + 1).malformed


@pytest.mark.parametrize("data", [b"", bytes(7), bytes(8), bytes(24), bytes(33)])
def test_a_malformed_state_is_ignored(data: bytes) -> None:
    assert AckState.unpack(data, 2) is None


def test_a_silent_path_is_probed_before_it_is_dropped() -> None:
    assert check_liveness(10.0, last_seen=9.8, probed=0.0, timeout=1.0, busy=True) == ALIVE
    assert check_liveness(10.0, last_seen=9.7, probed=0.0, timeout=1.0, busy=True) == SUSPECT
    assert check_liveness(10.0, last_seen=9.7, probed=9.8, timeout=1.0, busy=True) == ALIVE
    assert check_liveness(10.0, last_seen=9.9, probed=9.0, timeout=1.0, busy=True) == ALIVE
    assert check_liveness(10.0, last_seen=9.0, probed=9.2, timeout=1.0, busy=True) == DEAD
    assert check_liveness(10.0, last_seen=5.1, probed=0.0, timeout=1.0, busy=False) == ALIVE
    assert check_liveness(10.0, last_seen=4.9, probed=0.0, timeout=1.0, busy=False) == SUSPECT
