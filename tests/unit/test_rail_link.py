"""Rails without sockets: whatever breaks and whenever, every byte arrives once, in its place, and letters in order."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rail_pipes import Pair

from mpi_gpucomp.errors import BufferSpecError
from mpi_gpucomp.transport.rails import messages as module
from mpi_gpucomp.transport.rails.frames import DATA, LETTER, Header, Item, broken
from mpi_gpucomp.transport.rails.link import DEAD, FINE, QUIET, judge
from mpi_gpucomp.transport.rails.sequence import Have, Key, Receiver, Sender

TIERS = [[[0], [1]], [[0, 1]], [[0, 1], [2]], [[0]]]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 16)
    monkeypatch.setattr(module, "EAGER_BYTES", 8)


WHAT = ["put"] * 8 + ["get"] * 8 + ["run"] * 8 + ["send"] * 3 + ["receive"] * 3
WHAT += ["letter", "cut", "break", "connect", "calm"]
STEPS = 400


class Traffic:
    """What two ranks send each other, and what they should have in the end."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.sent: dict[tuple[int, int], list[tuple[bytes, bytearray, Any]]] = {}
        self.received: dict[tuple[int, int], list[tuple[bytearray, Any]]] = {}
        self.letters: list[list[bytes]] = [[], []]
        self.random = random.Random(5)

    def send(self, side: int, tag: int, size: int) -> None:
        memory = bytearray(self.random.randbytes(size))
        transfer = self.pair.ends[side].messages.send(1 - side, tag, memoryview(memory))
        self.sent.setdefault((side, tag), []).append((bytes(memory), memory, transfer))

    def receive(self, side: int, tag: int) -> None:
        memory = bytearray(80)
        transfer = self.pair.ends[side].messages.receive(1 - side, tag, memoryview(memory))
        self.received.setdefault((1 - side, tag), []).append((memory, transfer))

    def letter(self, side: int, size: int) -> None:
        text = b"%d:" % len(self.letters[side]) + bytes(size)
        self.letters[side].append(text)
        self.pair.ends[side].link.post(Item(LETTER, text))

    def overwrite(self) -> None:
        """Use the memory of what has been sent for something else, as callers may."""
        for messages in self.sent.values():
            for data, memory, transfer in messages:
                if transfer.done():
                    memory[:] = b"\xaa" * len(data)

    def check(self, *, anew: bool) -> None:
        for (side, tag), messages in self.sent.items():
            while len(self.received.get((side, tag), ())) < len(messages):
                self.receive(1 - side, tag)
        self.pair.settle(anew=anew)
        for key, messages in self.sent.items():
            for (data, _, transfer), (memory, receiving) in zip(messages, self.received[key], strict=False):
                assert transfer.done() and receiving.done() and receiving.nbytes == len(data)
                assert memory == data + bytes(80 - len(data))
        for side in (0, 1):
            assert [text for _, text in self.pair.ends[1 - side].messages.letters] == self.letters[side]
            assert self.pair.ends[side].link.all_acked and not self.pair.ends[side].link.busy


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("tiers", TIERS)
@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 32), anew=st.booleans())
def test_every_byte_arrives_once_whatever_breaks(tiers: list[list[int]], slow: bool, seed: int, anew: bool) -> None:
    """Do anything in any order; in the end go on with the paths that are left, if some are, or with new ones."""
    pair, draw = Pair(tiers, slow=slow), random.Random(seed)
    traffic = Traffic(pair)
    for _ in range(STEPS):
        what, side, number, size = draw.choice(WHAT), draw.randrange(2), draw.randrange(3), draw.randrange(71)
        rail = number % len(pair.rails)
        path = pair.path(side, rail)
        if what == "send":
            traffic.send(side, number, size)
        elif what == "receive":
            traffic.receive(side, number)
        elif what == "letter":
            traffic.letter(side, size)
        elif what == "connect":
            pair.connect(rail)
        elif what == "calm" and pair.ends[side].fading:
            draw.choice(pair.ends[side].fading).calm()
        elif what == "run":  # so that long messages get somewhere
            pair.run(rail, size // 8)
        elif path is not None and what == "put":
            path.put()
        elif path is not None and what == "get":
            path.get()
        elif path is not None and what == "break":  # in the middle of a frame
            path.get(share=size / 71)
        elif path is not None and what == "cut":
            pair.ends[side].link.down(path, "cut")
        traffic.overwrite()
    traffic.check(anew=anew or not pair.joined())


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("tdlr"), st.integers(0, 1)), max_size=80))
def test_pointers_keep_their_order(steps: list[tuple[str, int]]) -> None:
    """Take, deliver, lose and resume at random: pointers stay in order, and all is done in the end, each once."""
    sender: Sender[int] = Sender()
    receiver: Receiver[int] = Receiver()
    wires: list[list[int]] = [[], []]
    generation, dead, got = [1, 1], [0, 0], []
    for number in range(10):
        assert sender.post(number) == number

    def deliver(rail: int) -> None:
        if wires[rail]:
            number = wires[rail].pop(0)
            if receiver.begin(number, Key(rail, generation[rail])):
                got.extend(receiver.finish(number, number))

    for what, rail in [*steps, ("l", 0), ("l", 1), ("r", 0), *[("t", 0), ("d", 0)] * 10]:
        if what == "t" and (taken := sender.take(Key(rail, generation[rail]))) is not None:
            wires[rail].append(taken[0])
        elif what == "d":
            deliver(rail)
        elif what == "l":
            wires[rail].clear()
            dead[rail], generation[rail] = generation[rail], generation[rail] + 1
            receiver.lose(lambda key: key.generation <= dead[key.rail])
        elif what == "r":
            have = Have.read(receiver.have(tuple(dead)).pack(), 2)
            assert have is not None
            sender.resume(have)
        assert sender.acked <= sender.transmitted <= sender.posted
        assert receiver.done <= receiver.received
    sender.ack(receiver.done)
    assert got == list(range(10)) and sender.all_acked


def test_what_arrives_twice_is_taken_once() -> None:
    receiver: Receiver[str] = Receiver()
    path, other = Key(0, 1), Key(1, 1)
    assert receiver.begin(1, path) and not receiver.begin(1, other)
    assert receiver.finish(1, "b") == [] and not receiver.begin(1, other)
    assert receiver.have((0, 0)) == (0, (1,), (0, 0)) and receiver.received == 2
    assert receiver.begin(0, other) and receiver.finish(0, "a") == ["a", "b"]
    assert not receiver.begin(0, path) and not receiver.begin(1, path)


def test_only_what_was_lost_is_sent_again() -> None:
    sender: Sender[str] = Sender()
    for item in "abcd":
        sender.post(item)
    path, other = Key(0, 3), Key(1, 1)
    assert [sender.take(where) for where in (path, other, path)] == [(0, "a"), (1, "b"), (2, "c")]
    assert sender.resume(Have(0, (2,), (3, 0))) == []
    assert [sender.take(other) for _ in range(3)] == [(0, "a"), (3, "d"), None]
    assert sender.ack(4) == ["a", "b", "c", "d"] and sender.all_acked


def test_nobody_hears_of_a_path_before_it_is_quiet() -> None:
    """What arrives late is written to where it was to go: the sender must not have sent it again before."""
    pair = Pair([[0], [1]], slow=True)
    memory, data = bytearray(40), bytes(range(40))
    receiving = pair.ends[1].messages.receive(0, 4, memoryview(memory))
    pair.ends[0].messages.send(1, 4, memoryview(data))
    near, far = pair.path(0, 0), pair.path(1, 0)
    assert near is not None and far is not None
    while not (near.wire and Header.read(near.wire[0][0]).kind == DATA):
        _ = far.get(), far.put(), near.get(), near.put()
    far.get(share=0.5)
    link = pair.ends[1].link
    assert link.in_use == [1] and link.dead == (0, 0) and link.given_up == [1, 0]
    assert link.failovers[0].lost is None
    pair.connect(0)
    assert link.dead == (0, 0), "a new path says nothing of the one before"
    pair.settle(anew=False)
    assert receiving.done() and memory == data and link.dead == (1, 0)
    assert all(lost.lost is not None for end in pair.ends for lost in end.link.failovers)


def test_later_generations_wait_for_those_before() -> None:
    pair = Pair([[0], [1]], slow=True)
    end = pair.ends[0]
    pair.connect(0)
    pair.connect(0)
    first, second = end.fading
    second.calm()
    assert end.link.dead == (0, 0)
    first.calm()
    assert end.link.dead == (2, 0)


def test_what_a_path_may_still_read_is_kept() -> None:
    sender: Sender[str] = Sender()
    path, other = Key(0, 1), Key(1, 1)
    for item in "abc":
        sender.post(item)
        sender.take(path)
    sender.hold(path)
    assert sender.ack(1) == [] and sender.resume(Have(1, (2,), (1, 0))) == [] and sender.take(other) is None
    assert sender.release(path) == ["a"]
    assert [sender.take(other) for _ in range(2)] == [(1, "b"), None] and sender.ack(3) == ["b", "c"]


def test_failback_waits_for_the_next_message() -> None:
    pair = Pair([[0], [1]])
    link = pair.ends[0].link
    assert link.in_use == [0]
    path = pair.path(0, 0)
    assert path is not None
    link.down(path, "cut")
    assert link.in_use == [1]
    pair.connect(0)
    assert link.in_use == [1]
    pair.ends[0].messages.send(1, 3, memoryview(bytes(4)))
    assert link.in_use == [1], "not before it has held for a while"
    assert link.missing == {0}
    link.paths[0].since -= 1.1
    assert link.in_use == [1]
    pair.ends[0].messages.send(1, 3, memoryview(bytes(4)))
    assert link.in_use == [0] and link.missing == set()
    link.down(link.paths[1], "cut")
    link.down(link.paths[0], "cut")
    assert link.in_use == []
    pair.connect(1)
    assert link.in_use == [1], "better than none"
    assert [(lost.rail, lost.reason) for lost in link.failovers] == [(0, "cut"), (1, "cut"), (0, "cut")]


def test_a_message_that_is_too_long_is_an_error_and_no_overflow() -> None:
    pair = Pair([[0]])
    memory = bytearray(b"\x07" * 30)
    receiving = pair.ends[1].messages.receive(0, 4, memoryview(memory)[:20])
    pair.ends[0].messages.send(1, 4, memoryview(bytes(25)))
    pair.settle()
    with pytest.raises(BufferSpecError) as error:
        receiving.done()
    assert str(error.value) == (
        "rank 1: message from rank 0, tag 4: expected at most 20 bytes, got 25. Make room for as much as is sent."
    )
    assert memory == b"\x07" * 30


def test_a_rank_sends_to_itself() -> None:
    messages = Pair([[0]]).ends[0].messages
    for size in (3, 40):
        memory = bytearray(50)
        sending = messages.send(0, 1, memoryview(bytes(range(size))))
        assert sending.done() is (size == 3)
        assert messages.probe_any() == 1
        receiving = messages.receive(0, 1, memoryview(memory))
        assert sending.done() and receiving.done() and memory[:size] == bytes(range(size))
    assert messages.probe_any() is None


def test_receives_are_taken_back_and_messages_thrown_away() -> None:
    pair = Pair([[0]])
    receiving = pair.ends[1].messages.receive(0, 2, memoryview(bytearray(30)))
    assert receiving.cancel() and not receiving.cancel()
    sending = pair.ends[0].messages.send(1, 2, memoryview(bytes(30)))
    pair.settle()
    assert pair.ends[1].messages.probe_any() == 2 and not sending.done()
    assert pair.ends[1].messages.discard(0, 3) is None
    thrown = pair.ends[1].messages.discard(0, 2)
    assert thrown is not None and not thrown.cancel()
    pair.settle()
    assert thrown.done() and sending.done() and pair.ends[1].messages.probe_any() is None


def test_long_messages_are_not_copied() -> None:
    pair = Pair([[0]])
    pair.ends[1].messages.receive(0, 2, memoryview(bytearray(300)))
    pair.ends[0].messages.send(1, 2, memoryview(bytes(300)))
    pair.settle()
    assert [end.messages.copies for end in pair.ends] == [(0, 0), (0, 0)]
    pair.ends[0].messages.send(1, 2, memoryview(bytes(5)))
    assert pair.ends[0].messages.copies == (1, 5)


@pytest.mark.parametrize("size", [5, 40])
def test_messages_know_their_rail(size: int) -> None:
    pair = Pair([[0], [1]])
    for rail in (0, 1):
        receiving = pair.ends[1].messages.receive(0, 2, memoryview(bytearray(size)))
        sending = pair.ends[0].messages.send(1, 2, memoryview(bytes(size)))
        pair.settle(anew=False)
        assert (sending.rail, receiving.rail) == (rail, rail)
        path = pair.path(0, 0)
        if path is not None:
            pair.ends[0].link.down(path, "cut")


def test_headers() -> None:
    header = Header(1, 2, 3, 4, 5, 6)
    assert Header.read(header.pack()) == header and not broken(header)
    assert broken(header._replace(kind=0)) and broken(header._replace(kind=11))
    assert broken(header._replace(length=(1 << 30) + 1))


@pytest.mark.parametrize("data", [b"", bytes(7), bytes(8), bytes(24), bytes(33)])
def test_a_state_that_is_none_is_not_read(data: bytes) -> None:
    assert Have.read(data, 2) is None


def test_a_path_is_asked_before_it_is_given_up() -> None:
    assert judge(10.0, heard=9.8, asked=0.0, timeout=1.0, busy=True) == FINE
    assert judge(10.0, heard=9.7, asked=0.0, timeout=1.0, busy=True) == QUIET
    assert judge(10.0, heard=9.7, asked=9.8, timeout=1.0, busy=True) == FINE
    assert judge(10.0, heard=9.9, asked=9.0, timeout=1.0, busy=True) == FINE
    assert judge(10.0, heard=9.0, asked=9.2, timeout=1.0, busy=True) == DEAD
    assert judge(10.0, heard=5.1, asked=0.0, timeout=1.0, busy=False) == FINE
    assert judge(10.0, heard=4.9, asked=0.0, timeout=1.0, busy=False) == QUIET
