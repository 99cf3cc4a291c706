"""Failing together, on many ranks in one process: damaged messages, codecs that raise, late and silent ranks."""

from __future__ import annotations

import gc
import itertools
import random
import re
import time
import weakref
from collections import Counter
from types import NoneType

import numpy as np
import pytest
from running import Ranks, expected, lengths

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.codec.split import Split
from mpi_gpucomp.device import as_buffer, get_device
from mpi_gpucomp.engine import failure
from mpi_gpucomp.engine.agreement import REMEMBERED, AgreementCheck, CallId, CallRegistry, CallResult
from mpi_gpucomp.engine.coder import Coder
from mpi_gpucomp.engine.control_messages import Abort, EnvelopeMessage, Join, ObserverMessage, encode
from mpi_gpucomp.engine.deadlock import WaitStatus, describe, is_circular
from mpi_gpucomp.engine.engine import Engine
from mpi_gpucomp.engine.program import Blocks, Layout
from mpi_gpucomp.engine.scheduling import Job
from mpi_gpucomp.engine.task import CollectiveTask
from mpi_gpucomp.errors import FrameError, PeerError, RankFailedError
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.transport.loopback import loopback

KINDS = {
    "chain": ("broadcast", "chain"),
    "tree": ("broadcast", "tree"),
    "ring": ("allreduce", "ring"),
    "pairwise": ("alltoall", "pairwise"),
}
REPEATED = [("chain", "repeat"), ("tree", "repeat")]
"""A repeated message is detected by its loop; within one, the transport keeps the order."""
COUNT, PIECE = 700, 100
SECONDS = 30


class World:
    """The engines of all ranks; each has one stream per codec, as a communicator does."""

    def __init__(self, ranks, *, timeout=None, slots=2, eager=0):
        self.ranks, self.networks = ranks, loopback(ranks, eager)
        self.engines = [Engine(wire, slots, timeout) for wire in self.networks]
        self.coders = {}

    def start(self, rank, kind, name, codec="split", root=0, length=COUNT, tag=None):
        """Submit a collective on one rank; return its job, its output and the expected output."""
        collective, algorithm = KINDS[kind]
        built = build(collective, algorithm, self.ranks, root)
        sent, received = lengths(collective, self.ranks, length)
        draw = np.random.default_rng(len(name))
        inputs = [draw.integers(-2, 3, sent * length).astype(np.float32) for _ in range(self.ranks)]
        output = inputs[rank].copy() if collective == "broadcast" else np.full(received * length, 77, np.float32)
        to = Blocks.even(as_buffer(output), received)
        source = to if collective == "broadcast" else Blocks.even(as_buffer(inputs[rank]), sent)
        key = rank, codec if isinstance(codec, str) else id(codec)
        if key not in self.coders:
            coder = Coder(get_codec(codec) if isinstance(codec, str) else codec, get_device("host"), inline=True)
            self.coders[key] = coder
        engine, layout = self.engines[rank], Layout(built.spec, source, to, PIECE)
        tag = engine.free_tag() if tag is None else tag
        task = CollectiveTask(
            built, layout, to.buffer.dtype, self.coders[key], self.networks[rank], tag, name=collective
        )
        job = Job(task, f"{kind} of {length}", name=name)
        engine.submit(job)
        return job, output, expected(collective, inputs, rank, root, "sum")

    def drive(self, until=None):
        """Poll all engines until they are idle."""
        deadline = time.monotonic() + SECONDS
        while not (until() if until else all(engine.idle for engine in self.engines)):
            for engine in self.engines:
                engine.progress()
            assert time.monotonic() < deadline, "timed out"

    def left(self):
        """Return the number of messages, receives and control messages in flight."""
        return self.networks[0].network.left


def all_right(started):
    return all(job.finished and job.error is None and np.array_equal(got, right) for job, got, right in started)


def check_works(world, names):
    """Run collectives under these names on all ranks, and check that they succeed and leave nothing in flight."""
    for name, kind in names.items():
        started = [world.start(rank, kind, name) for rank in range(world.ranks)]
        world.drive()
        assert all_right(started), name
    assert world.left() == 0


def damaged_world(ranks, how, seed):
    """Return a world in which a random rank damages a message of tag 0."""
    choice, world = random.Random(seed), World(ranks)
    culprit = choice.randrange(ranks)
    world.networks[culprit].damage(tag=0, at=choice.randrange(6), how=how, seed=seed)
    return world, culprit


@pytest.mark.parametrize(("kind", "how"), [*itertools.product(KINDS, ["flip", "cut"]), *REPEATED])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_damaged_message_fails_on_all_ranks_and_affects_nothing_else(kind, ranks, how):
    found = 0
    for seed in range(5):
        world, culprit = damaged_world(ranks, how, seed)
        others = {f"other {number}": kind for number, kind in enumerate([*KINDS, *KINDS])}
        target, rest = [], []
        for rank in range(ranks):
            order = [*others]
            random.Random(seed + rank).shuffle(order)
            for name in order[:4]:
                rest.append(world.start(rank, others[name], name))
            target.append(world.start(rank, kind, "grad.3", tag=0))
            for name in order[4:]:
                rest.append(world.start(rank, others[name], name))
        world.drive()
        finder = world.networks[culprit].damaged_peer
        assert all_right(rest), "other collectives are affected"
        if finder is None:  # this rank sends fewer messages
            assert all_right(target)
            continue
        found += 1
        check_errors(target, culprit, finder, kind)
        assert world.left() == 0
        check_works(world, {"grad.3": kind, "other 0": "chain", "": kind})
    assert found, "no message was damaged"


def check_errors(target, culprit, finder, kind):
    title, error = f"{KINDS[kind][0]} 'grad.3'", target[finder][0].error
    assert isinstance(error, FrameError)
    where = rf"rank {finder}: {title}, chunk \d of loop \d, from rank {culprit}: expected .+, got .+\. .+"
    assert re.fullmatch(where, str(error)), error
    for rank, (job, got, right) in enumerate(target):
        if job.error is None:  # it had completed before
            assert np.array_equal(got, right)
        elif rank != finder:
            assert isinstance(job.error, PeerError)
            assert str(job.error) == (
                f"rank {rank}: {title}: expected success on every rank, got on rank {finder} FrameError: {error} "
                "Fix the error there. The output here is incomplete; the communicator can still be used."
            )


class Fragile(Split):
    """A codec that raises once, in the call or in the work that it queues."""

    def __init__(self, when, after):
        super().__init__()
        self.when, self.left = when, after

    def encode(self, source, to, stream):
        return self._then(super().encode, "encode", source, to, stream)

    def decode_reduce(self, source, nbytes, to, op, stream):
        return self._then(super().decode_reduce, "decode", source, nbytes, to, op, stream)

    def _then(self, method, what, *args):
        if self.when.endswith(what):
            self.left -= 1
            if self.left == 0 and self.when == what:
                raise ZeroDivisionError(what)
            if self.left == 0:
                args[-1].run(lambda: 1 // 0)
        return method(*args)


@pytest.mark.parametrize("when", ["encode", "decode", "queued encode", "queued decode"])
@pytest.mark.parametrize("after", [1, 4])
def test_an_error_of_a_codec_fails_on_all_ranks(when, after):
    world, codecs = World(3), [get_codec("split"), Fragile(when, after), get_codec("split")]
    names = {f"{kind} {number}": kind for number in range(2) for kind in ("ring", "pairwise")}
    for again in range(2):
        started = {
            (rank, name): world.start(rank, kind, name, codecs[rank])
            for rank in range(3)
            for name, kind in names.items()
        }
        world.drive()
        errors = Counter(type(job.error).__name__ for job, _, _ in started.values())
        for (rank, name), (job, got, right) in started.items():
            assert job.error is not None or np.array_equal(got, right), (rank, name)
            assert isinstance(job.error, (NoneType, ZeroDivisionError if rank == 1 else PeerError, PeerError))
        assert world.left() == 0
        assert (errors["ZeroDivisionError"] > 0) != again
    assert errors == {"NoneType": 12}


class InPython(Split):
    """A codec that the core does not know, so that everything is done on streams, by Python."""


def test_copies_skipped_by_a_failed_stream_are_detected():
    run = Ranks(build("gather", "linear", 2), 50, InPython(), "float32")
    run.coders[0].stream.run(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        run.drive()


def test_draining_clears_the_error_of_queued_work():
    run = Ranks(build("broadcast", "chain", 2), 500, InPython(), "float32")
    for _ in range(2):
        run.progress()
    stream = run.coders[1].stream
    stream.run(lambda: 1 // 0)
    for task in run.tasks:
        task.abandon()
    owed = {(0, 0): run.tasks[0].sent[1, 0]}
    deadline = time.monotonic() + SECONDS
    while not all([task.drain(owed if task is run.tasks[1] else {}) for task in run.tasks]):
        assert time.monotonic() < deadline
    assert owed[0, 0] > 0
    stream.synchronize()


@pytest.fixture
def soon(monkeypatch):
    """Wait only briefly for late ranks."""
    monkeypatch.setattr(failure, "GRACE", 0.05)


class Broken(AgreementCheck):
    """A call that fails."""

    def __init__(self, error):
        super().__init__("allreduce")
        self.error = error

    def progress(self):
        raise self.error


def test_a_rank_that_joins_a_failed_call_late_fails_too(soon):
    world = World(4)
    first = [world.start(rank, "ring", "grad.1", length=COUNT + (rank == 1)) for rank in range(3)]
    world.drive(lambda: all(job.finished for job, _, _ in first))
    late = world.start(3, "ring", "grad.1")
    world.engines[3].progress()  # it ends the call before the answers arrive
    world.drive()
    title = "allreduce 'grad.1': expected the same call on every rank, got"
    for rank, (job, _, _) in enumerate([*first, late]):
        assert str(job.error).startswith(f"rank {rank}: {title} rank")
    for _ in range(3):
        for engine in world.engines:
            engine.progress()
    assert world.left() == 0, "control messages do not end"
    check_works(world, {"grad.1": "ring"})


def test_a_rank_that_never_reports_fails_the_communicator(soon):
    world = World(3, timeout=0.1)
    mine, other = Job(Broken(ValueError("broken")), name="x"), Job(AgreementCheck("barrier"), name="y")
    two = Job(Broken(ValueError("broken")), name="x")
    for job, rank in ((mine, 0), (other, 0), (two, 1)):
        world.engines[rank].submit(job)
    Engine(world.networks[2]).submit(Job(AgreementCheck("allreduce"), name="x"))  # joins, and is never polled
    deadline = time.monotonic() + SECONDS
    while not (mine.finished and two.finished) and time.monotonic() < deadline:
        for engine in world.engines[:2]:
            engine.progress()
    text = (
        "rank 0: allreduce 'x': expected every rank to report after it failed, and all messages to arrive, got no "
        "report from rank 2. Make a new communicator without the failed ranks; this one cannot be used any more."
    )
    assert isinstance(mine.error, RankFailedError) and str(mine.error) == text
    assert other.error is mine.error and other.finished and world.engines[0].idle
    with pytest.raises(RankFailedError, match="no report from rank 2"):
        world.engines[0].submit(Job(AgreementCheck("barrier")))


def test_a_lost_message_fails_the_communicator(soon):
    world = World(2, timeout=0.2, eager=1 << 20)
    world.networks[0].damage(tag=0, at=0, how="lose")
    started = [world.start(rank, "chain", "x", tag=0) for rank in range(2)]
    world.drive(lambda: all(job.finished for job, _, _ in started))
    error = started[1][0].error
    assert isinstance(error, RankFailedError) and str(error) == (
        "rank 1: broadcast 'x': expected every rank to report after it failed, and all messages to arrive, got "
        "messages still in flight. Make a new communicator without the failed ranks; this one cannot be used any more."
    )
    assert str(error.__cause__) == (
        "rank 1: broadcast 'x', chunk 0 of loop 0, from rank 0: expected a frame of loop 0, got one of loop 1. "
        "A message was lost, repeated or reordered."
    )
    assert world.engines[1].broken is error


def test_memory_of_messages_in_flight_is_kept(soon):
    """After a failure the wire may still write to it, whatever the caller does."""
    world = World(2, timeout=0.2, eager=1 << 20)
    world.networks[0].damage(tag=0, at=0, how="lose")
    started = [world.start(rank, "chain", "x", tag=0) for rank in range(2)]
    world.drive(lambda: all(job.finished for job, _, _ in started))
    undrained = weakref.ref(started[1][1])
    started.clear()
    gc.collect()
    assert undrained() is not None

    world, message = World(2), Message()
    world.engines[0].p2p_operations.append(message)
    sent = weakref.ref(message)
    world.engines[0].abort(ValueError("no more"))
    assert message.done and isinstance(message.error, PeerError)
    del message
    gc.collect()
    assert sent() is not None


class Message:
    """A point-to-point operation in flight."""

    done, error = False, None

    def progress(self):
        return False


def abort_text(rank, why):
    return (
        f"rank {rank}: communicator: expected no rank to abort, got on rank 1 {why}. "
        "Make a new communicator; this one cannot be used any more."
    )


def test_a_rank_that_aborts_fails_all_ranks():
    world = World(3)
    waiting = {rank: world.start(rank, "ring", "x")[0] for rank in (0, 2)}
    world.engines[1].abort(ValueError("no more"))
    world.drive()
    for rank, job in waiting.items():
        assert isinstance(job.error, PeerError) and str(job.error) == abort_text(rank, "ValueError: no more")
        with pytest.raises(PeerError, match=r"^rank \d: communicator: expected no rank to abort"):
            world.start(rank, "ring", "y")


VERSIONS = "Install the same version of mpi_gpucomp on every rank."
OPTIONS = "Use the same options of the communicator on every rank."


@pytest.mark.parametrize(
    ("data", "topic", "text"),
    [
        (b"", "", f"expected a header of 8 bytes, got 0. {VERSIONS}"),
        (b"nonsense", "", f"expected the magic bytes b'GC', got b'no'. {VERSIONS}"),
        (b"GC\x03\x01" + bytes(4), "", f"expected protocol version 2, got 3. {VERSIONS}"),
        (b"GC\x02\xff" + bytes(4), "", f"expected a kind from 1 to 8, got 255. {VERSIONS}"),
        (b"GC\x02\x03\xff\xff\xff\xff", " Abort", f"expected at most 16777216 bytes, got 4294967295. {VERSIONS}"),
        (encode(Abort("why"))[:-1], " Abort", f"expected a body of 7 bytes, got 6. {VERSIONS}"),
        (b"GC\x02\x03\x05\0\0\0\x01\0\0\0\xff", " Abort", f"expected text in UTF-8, got byte 0xff. {VERSIONS}"),
        (
            encode(ObserverMessage("x")),
            " ObserverMessage",
            f"expected one of these kinds: none, got 'x'. {OPTIONS}",
        ),
        (
            encode(EnvelopeMessage(1, b"")),
            " EnvelopeMessage",
            f"expected no EnvelopeMessage on this communicator, got one. {OPTIONS}",
        ),
    ],
)
def test_a_malformed_control_message_fails_all_ranks(data, topic, text):
    """A peer sends garbage: every rank raises an error that names it, and no rank hangs."""
    world = World(3)
    started = [world.start(rank, "ring", "x")[0] for rank in range(3)]
    world.networks[0].send_control(1, data)
    world.drive()
    why = f"ControlMessageError: rank 1: control message{topic} from rank 0: {text}"
    for rank, job in enumerate(started):
        assert isinstance(job.error, PeerError) and str(job.error) == abort_text(rank, why)
        with pytest.raises(PeerError, match="control message"):
            world.start(rank, "ring", "y")


def test_an_interrupt_in_a_call_fails_the_communicator():
    world = World(2)
    jobs = [world.start(0, "ring", "x")[0], Job(Broken(KeyboardInterrupt()), f"ring of {COUNT}", name="x")]
    world.engines[1].submit(jobs[1])
    with pytest.raises(KeyboardInterrupt):
        world.drive()
    world.drive()
    assert [str(job.error) for job in jobs] == [abort_text(rank, "KeyboardInterrupt") for rank in range(2)]


def test_an_interrupt_between_calls_fails_the_communicator(monkeypatch):
    world = World(2)
    job = world.start(0, "ring", "x")[0]

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(world.networks[1], "events", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.engines[1].progress()
    world.drive()
    assert str(job.error) == abort_text(0, "KeyboardInterrupt")


def test_an_error_of_a_callback_fails_the_next_call():
    world = World(3)
    done = [world.start(rank, "ring", "x") for rank in range(3)]
    world.drive()
    world.engines[1].fail_next_call(done[1][0], ValueError("in a callback"))
    started = [world.start(rank, "ring", "y")[0] for rank in range(3)]
    world.drive()
    text = (
        "rank 1: callback of allreduce 'x': expected success on every rank, got ValueError: in a callback. "
        "Fix the callback; the collective itself has completed."
    )
    assert str(done[1][0].error) == "in a callback" and str(started[1].error) == text
    assert all(f"on rank 1 PeerError: {text}" in str(started[rank].error) for rank in (0, 2))
    check_works(world, {"y": "ring"})


def test_the_registry_remembers_recent_calls():
    registry = CallRegistry()
    calls = [registry.begin("x") for _ in range(REMEMBERED + 1)]
    assert calls[:2] == [CallId("x", 1), CallId("x", 2)] and registry.runs == {"x": REMEMBERED + 1}
    join = Join(*calls[0], "signature", 8)
    registry.add_join(calls[0], 3, join)
    assert registry.joins(calls[0]) == {3: join}
    for call in calls:
        registry.end(call, CallResult(f"signature {call.run}", Counter({(1, 0): call.run}), 5))
    assert registry.joins(calls[0]) == {} and registry.has_begun(calls[-1])
    assert not registry.has_begun(CallId("x", REMEMBERED + 2))
    assert registry.result(calls[1]) == CallResult("signature 2", Counter({(1, 0): 2}), 5)
    assert registry.result(calls[0]) == CallResult("a call completed long ago", Counter(), None)


A, B = CallId("a", 1), CallId("b", 1)


@pytest.mark.parametrize(
    ("replies", "circular", "text"),
    [
        (
            {0: WaitStatus({A: "A"}, {"a": 1}), 1: WaitStatus({B: "B"}, {"b": 1})},
            True,
            "rank 0 waits for A, which rank 1 has not joined; rank 1 waits for B, which rank 0 has not joined",
        ),
        (
            {0: WaitStatus({A: "A"}, {"a": 1}), 1: WaitStatus({}, {})},
            False,
            "rank 0 waits for A, which rank 1 has not joined; rank 1 is not blocked here",
        ),
        (
            {0: WaitStatus({A: "A"}, {"a": 1}), 1: WaitStatus({A: "A"}, {"a": 1})},
            False,
            "rank 0 waits for A, which all ranks have joined; rank 1 waits for A, which all ranks have joined",
        ),
        (
            {0: WaitStatus({A: "A"}, {"a": 1})},
            False,
            "rank 0 waits for A, which rank 1 has not joined; rank 1 does not reply",
        ),
    ],
)
def test_deadlock_diagnosis(replies, circular, text):
    assert is_circular(replies, 2, 0) == circular
    assert describe(replies, 2) == text
