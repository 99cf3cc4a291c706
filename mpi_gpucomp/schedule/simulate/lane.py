"""A lane of a program in a simulation: the engine's rules (`engine.task`), with time in the place of data.

A lane waits for the steps that its own come after, for messages, and for what it encodes. It does not wait for what it
decodes, nor for its messages to leave. A chunk is encoded once however often it is sent, and forwarded as it came.
Elements as they are (no codec) leave and arrive where they are, unless something else is there that must go first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.simulate.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from mpi_gpucomp.schedule.cost import CodecCost
    from mpi_gpucomp.schedule.dataflow import ChunkValue, Dataflow
    from mpi_gpucomp.schedule.ir import Lane, Step
    from mpi_gpucomp.schedule.simulate.network import Clock, Connection, Wire

    Waiting = Generator[None, None, None]

__all__ = ["Cores", "Rank", "Stream", "Walk", "Work"]


# Streams of a rank, on which its codec works in order, and its messages are handled, and the cores that they share.


class Work:
    """Something for a stream to do, and who waits for it."""

    __slots__ = ("cause", "done", "ended", "kind", "loop", "nbytes", "number", "seconds", "wake")

    def __init__(self, kind: str, loop: int, nbytes: float, seconds: float, cause: int) -> None:
        """Describe it; `cause` is the record that it follows from."""
        self.kind, self.loop, self.nbytes, self.seconds, self.cause = kind, loop, nbytes, seconds, cause
        self.done, self.number, self.ended = False, -1, 0.0
        self.wake: Callable[[], None] | None = None


class Cores:
    """So many cores, for the streams that ask first."""

    def __init__(self, count: float) -> None:
        """Begin with all of them free; a part of one is a whole one that is slower, as all of them are then."""
        self._free = ceil(count)
        self.slowness = ceil(count) / count
        self._line: deque[Callable[[], None]] = deque()

    def ask(self, begin: Callable[[], None]) -> None:
        """Begin on a core, now or when one is free."""
        if self._free:
            self._free -= 1
            begin()
        else:
            self._line.append(begin)

    def give_back(self) -> None:
        """Let the next one have a core."""
        if self._line:
            self._line.popleft()()
        else:
            self._free += 1


class Stream:
    """The work of a rank, one thing after the other."""

    def __init__(self, clock: Clock, rank: int, records: list[Record], cores: Cores | None) -> None:
        """Work on cores that are shared, or on its own."""
        self._clock, self._rank, self._records, self._cores = clock, rank, records, cores
        self._line: deque[Work] = deque()
        self._last = -1

    def add(self, work: Work) -> Work:
        """Queue some work, and return it."""
        self.queue(work)
        return work

    def queue(self, work: Work) -> None:
        """Queue some work."""
        self._line.append(work)
        if len(self._line) == 1:
            self._next()

    def _next(self) -> None:
        if self._cores is None:
            self._begin()
        else:
            self._cores.ask(self._begin)

    def _begin(self) -> None:
        work, now = self._line[0], self._clock.now
        # What it waited for longest: the work before it on this stream, if that has just ended.
        waited = self._last >= 0 and self._records[self._last].end >= now
        work.number = len(self._records)
        cause = self._last if waited else work.cause
        end = now + work.seconds * (self._cores.slowness if self._cores else 1.0)
        self._records.append(Record(work.kind, self._rank, -1, work.loop, work.nbytes, now, end, cause))
        self._clock.at(end, partial(self._end, work))

    def _end(self, work: Work) -> None:
        self._line.popleft()
        self._last, work.done, work.ended = work.number, True, self._clock.now
        if self._cores is not None:
            self._cores.give_back()
        if self._line:
            self._next()
        if work.wake is not None:
            work.wake()


class _Shared:
    """A frame that several sends want: whether it is there, since which record, and who waits for it."""

    __slots__ = ("left", "number", "ready", "waiting")

    def __init__(self, uses: int) -> None:
        self.left, self.ready, self.number = uses, False, -1
        self.waiting: list[Callable[[], None]] = []


@dataclass
class Rank:
    """What the lanes of one rank have in common."""

    clock: Clock
    lanes: Sequence[Lane]
    versions: Dataflow
    stream: Stream
    wire: Wire
    pieces: Sequence[float]
    """Plain bytes of a chunk in each loop."""
    codings: tuple[CodecCost, CodecCost]
    """Of the codec, and of chunks that go as they are."""
    plain: bool
    """Whether there is no codec at all, and so no frames."""
    finished: list[int] = field(default_factory=list)
    """Steps that each lane has done."""
    causes: list[int] = field(default_factory=list)
    """The record that each lane's last step followed from."""
    waiting: dict[int, list[Callable[[], None]]] = field(default_factory=dict)
    """Who waits for a lane to go on."""
    shared: dict[tuple[int, ChunkValue, bool], _Shared] = field(default_factory=dict)


class Walk:
    """One lane on its way through all loops."""

    def __init__(self, rank: Rank, number: int, outgoing: Connection | None, incoming: Connection | None) -> None:
        """Stand before the first step."""
        self._rank, self._number, self._lane = rank, number, rank.lanes[number]
        self._out, self._in = outgoing, incoming
        self._plain = self._lane.raw
        self._sent_as = rank.codings[rank.plain or self._plain]
        self._comes_plain = incoming is not None and incoming.plain
        self._came_as = rank.codings[rank.plain or self._comes_plain]
        self._cause = -1
        self._moves = self._walk()
        if incoming is not None:
            incoming.wake = self.go_on

    def go_on(self) -> None:
        """Move as far as possible; harmless where nothing has changed."""
        next(self._moves, None)

    def _walk(self) -> Waiting:
        rank, number = self._rank, self._number
        for loop in range(len(rank.pieces)):
            for index, step in enumerate(self._lane.steps):
                for other, at in step.after:
                    yield from self._follow(other, loop * len(rank.lanes[other].steps) + at + 1)
                for chunk in range(step.count):
                    yield from self._take(step, (number, index), chunk, loop)
                rank.finished[number] += 1
                rank.causes[number] = self._cause
                for wake in rank.waiting.pop(number, ()):
                    rank.clock.at(rank.clock.now, wake)

    def _follow(self, lane: int, steps: int) -> Waiting:
        """Wait for another lane of this rank."""
        rank = self._rank
        while rank.finished[lane] < steps:
            rank.waiting.setdefault(lane, []).append(self.go_on)
            yield
            self._cause = rank.causes[lane]

    def _take(self, step: Step, key: tuple[int, int], chunk: int, loop: int) -> Waiting:
        """Do one chunk of a step."""
        rank, kind = self._rank, step.kind
        if step.receives:
            assert self._in is not None
            while not self._in.arrived:
                yield
            self._cause = rank.wire.take(self._in)
        if kind == "s":
            yield from self._send_version(rank.versions.read[key][chunk], loop)
        elif kind in ("r", "rcs"):
            version = rank.versions.written[key][chunk]
            self._keep(version, loop, self._comes_plain)
            if kind == "rcs":
                self._post(loop, self._came_as)
            if not (
                rank.plain and version.first_write and version.persists and step.target and step.target.buffer != "s"
            ):
                self._queue("decode", loop, self._came_as.decode)
        elif step.receives:
            yield from self._reduce(step, key, chunk, loop)
        elif kind in ("cpy", "re"):
            self._queue("copy" if kind == "cpy" else "reduce", loop, rank.codings[1].decode if rank.plain else 0.0)

    def _reduce(self, step: Step, key: tuple[int, int], chunk: int, loop: int) -> Waiting:
        self._queue("reduce", loop, self._came_as.decode)
        if step.sends:
            yield from self._encode(loop)
            if step.target is not None:
                self._keep(self._rank.versions.written[key][chunk], loop, self._plain)
            self._post(loop, self._sent_as)

    def _send_version(self, version: ChunkValue, loop: int) -> Waiting:
        """Send a chunk in the frame that it came in or that another lane has made, or make one."""
        rank, key = self._rank, (loop, version, self._plain)
        shared = rank.shared.get(key)
        if shared is None:
            shared = rank.shared[key] = _Shared(version.sends_as(self._plain))
            if not (rank.plain and version.initial and version.persists):
                yield from self._encode(loop)
            shared.ready, shared.number = True, self._cause
            for wake in shared.waiting:
                rank.clock.at(rank.clock.now, wake)
        while not shared.ready:
            shared.waiting.append(self.go_on)
            yield
        self._cause = max(self._cause, shared.number)
        self._post(loop, self._sent_as)
        shared.left -= 1
        if not shared.left:
            del rank.shared[key]

    def _keep(self, version: ChunkValue, loop: int, plain: bool) -> None:
        if version.sends_as(plain):
            shared = self._rank.shared[loop, version, plain] = _Shared(version.sends_as(plain))
            shared.ready, shared.number = True, self._cause

    def _encode(self, loop: int) -> Waiting:
        """Wait until a chunk is encoded, or copied to where it can leave from."""
        work = self._queue("encode", loop, self._sent_as.encode)
        clock, wait = self._rank.clock, self._rank.wire.message_cost.wait
        # A frame that is made is noticed no sooner than a message that has come.
        work.wake = (lambda: clock.at(clock.now + wait, self.go_on)) if wait else self.go_on
        while not work.done or clock.now < work.ended + wait:
            yield
        self._cause = work.number

    def _queue(self, kind: str, loop: int, per_byte: float) -> Work:
        rank, nbytes = self._rank, self._rank.pieces[loop]
        seconds = nbytes * per_byte + (0.0 if rank.plain else rank.wire.message_cost.frame)
        return rank.stream.add(Work(kind, loop, nbytes, seconds, self._cause))

    def _post(self, loop: int, form: CodecCost) -> None:
        assert self._out is not None
        rank = self._rank
        rank.wire.post(self._out, rank.pieces[loop] / form.ratio, loop, self._cause)
