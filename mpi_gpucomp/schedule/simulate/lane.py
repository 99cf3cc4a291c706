"""A lane of a program in a simulation: the engine's rules (`engine.task`), with time in the place of data.

A lane waits for the steps that its own come after, for messages, and for what it encodes. It does not wait for what it
decodes, nor for its messages to leave. A chunk is encoded once however often it is sent, and forwarded as it came.
Elements as they are (no codec) leave and arrive where they are, unless something else is there that must go first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.simulate.stream import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from mpi_gpucomp.schedule.cost import Coding
    from mpi_gpucomp.schedule.ir import Lane, Step
    from mpi_gpucomp.schedule.simulate.clock import Clock
    from mpi_gpucomp.schedule.simulate.stream import Stream
    from mpi_gpucomp.schedule.simulate.wire import Connection, Wire
    from mpi_gpucomp.schedule.versions import Version, Versions

    Waiting = Generator[None, None, None]

__all__ = ["Rank", "Walk"]


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
    versions: Versions
    stream: Stream
    wire: Wire
    pieces: Sequence[float]
    """Plain bytes of a chunk in each loop."""
    codings: tuple[Coding, Coding]
    """Of the codec, and of chunks that go as they are."""
    plain: bool
    """Whether there is no codec at all, and so no frames."""
    finished: list[int] = field(default_factory=list)
    """Steps that each lane has done."""
    causes: list[int] = field(default_factory=list)
    """The record that each lane's last step followed from."""
    waiting: dict[int, list[Callable[[], None]]] = field(default_factory=dict)
    """Who waits for a lane to go on."""
    shared: dict[tuple[int, Version, bool], _Shared] = field(default_factory=dict)


class Walk:
    """One lane on its way through all loops."""

    def __init__(self, rank: Rank, number: int, outgoing: Connection | None, incoming: Connection | None) -> None:
        """Stand before the first step."""
        self._rank, self._number, self._lane = rank, number, rank.lanes[number]
        self._out, self._in = outgoing, incoming
        self._plain = self._lane.plain
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
            if not (rank.plain and version.first and version.stays and step.target and step.target.buffer != "s"):
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

    def _send_version(self, version: Version, loop: int) -> Waiting:
        """Send a chunk in the frame that it came in or that another lane has made, or make one."""
        rank, key = self._rank, (loop, version, self._plain)
        shared = rank.shared.get(key)
        if shared is None:
            shared = rank.shared[key] = _Shared(version.wanted(self._plain))
            if not (rank.plain and version.given and version.stays):
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

    def _keep(self, version: Version, loop: int, plain: bool) -> None:
        if version.wanted(plain):
            shared = self._rank.shared[loop, version, plain] = _Shared(version.wanted(plain))
            shared.ready, shared.number = True, self._cause

    def _encode(self, loop: int) -> Waiting:
        """Wait until a chunk is encoded, or copied to where it can leave from."""
        work = self._queue("encode", loop, self._sent_as.encode)
        clock, wait = self._rank.clock, self._rank.wire.handling.wait
        # A frame that is made is noticed no sooner than a message that has come.
        work.wake = (lambda: clock.at(clock.now + wait, self.go_on)) if wait else self.go_on
        while not work.done or clock.now < work.ended + wait:
            yield
        self._cause = work.number

    def _queue(self, kind: str, loop: int, per_byte: float) -> Work:
        rank, nbytes = self._rank, self._rank.pieces[loop]
        seconds = nbytes * per_byte + (0.0 if rank.plain else rank.wire.handling.frame)
        return rank.stream.add(Work(kind, loop, nbytes, seconds, self._cause))

    def _post(self, loop: int, form: Coding) -> None:
        assert self._out is not None
        rank = self._rank
        rank.wire.post(self._out, rank.pieces[loop] / form.ratio, loop, self._cause)
