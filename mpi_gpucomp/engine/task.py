"""One running collective: how it begins, goes on, is set aside, ends, or is given up after a failure.

What it does is in `Steps`.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from time import perf_counter_ns
from typing import TYPE_CHECKING, TypedDict

from mpi_gpucomp.codec import OPS, Pending
from mpi_gpucomp.codec.raw import REDUCE_TILE
from mpi_gpucomp.device import Buffer, Memory
from mpi_gpucomp.engine.agreement import CHANNELS
from mpi_gpucomp.engine.coder import HOST
from mpi_gpucomp.engine.lane_io import AHEAD, LaneIO, LaneState
from mpi_gpucomp.engine.staging import Frame, Scratch, Staging
from mpi_gpucomp.errors import FrameError, ScheduleError
from mpi_gpucomp.schedule.dataflow import ChunkValue, dataflow
from mpi_gpucomp.schedule.ir import Place
from mpi_gpucomp.trace import DECODE, ENCODE, NO_CALL_TRACE, CallTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from typing_extensions import Unpack

    from mpi_gpucomp.codec.frame import FrameHeader
    from mpi_gpucomp.device import DType
    from mpi_gpucomp.engine.coder import Coder
    from mpi_gpucomp.engine.layout import Layout
    from mpi_gpucomp.schedule.ir import Algorithm, Step
    from mpi_gpucomp.trace import InFlight
    from mpi_gpucomp.transport.base import Transport

    Ready = Callable[[], bool]
    Moves = Generator[Ready, None, None]
    from collections.abc import Callable, Mapping

    from mpi_gpucomp.device import Event, Stream

    StreamWork = Callable[[Stream], None]

__all__ = ["How", "Steps", "Task"]


# What the lanes of a task do, step by step: receive, send on as it came, encode, decode, reduce, copy.
#
# A lane is a generator that yields what it waits for. So its position is kept by itself: a task that is not asked
# to move
# stays where it is, and goes on from there when it is asked again.


class How(TypedDict, total=False):
    """In which manner steps are taken."""

    op: str
    same_everywhere: bool
    """Whether a rank that sends a final value takes what it encoded."""
    root_too: bool
    """Whether so does the root of a broadcast, whose elements a schedule leaves alone otherwise."""
    plain: bool
    """Whether elements go without frames, with codec none, from and to where they are if that can be."""


class _Shared:
    """A frame that several sends want, or will want once it is there."""

    __slots__ = ("frame", "left")

    def __init__(self, uses: int, frame: Frame | None = None) -> None:
        self.left, self.frame = uses, frame


class Steps:
    """The program of a rank, the messages of its lanes, and the work that they have under way."""

    def __init__(
        self,
        algorithm: Algorithm,
        layout: Layout,
        dtype: DType,
        coder: Coder,
        transport: Transport,
        tag: int,
        *,
        name: str,
        **how: Unpack[How],
    ) -> None:
        """Describe this rank's part; without a word on `how`, sums with frames."""
        rank = transport.rank
        self.title = name
        """What it is called in errors; whoever knows which call of that name it is says so here."""
        self._wire = LaneIO(transport, tag)
        self._program, self._layout, self._dtype = algorithm.programs[rank], layout, dtype
        self._coder, self._rank, self._op = coder, rank, how.get("op", "sum")
        self._versions = dataflow(algorithm, rank)
        self._comes_plain = _comes_plain(algorithm, rank)
        self._plain, self._root_too = how.get("plain", False), how.get("root_too", False)
        self._in_place = self._plain and coder.works_in_place
        self._settles = (how.get("same_everywhere", False) or self._root_too) and not coder.codec.lossless
        self._finished = [0] * len(self._program.lanes)
        self._shared: dict[tuple[int, ChunkValue, bool], _Shared] = {}
        self._scratch = Scratch(coder.stream, dtype, layout.piece)
        self._working: deque[tuple[Pending, Frame | None, tuple[int, int, int, int]]] = deque()
        """What is being decoded or copied, from which frame, and what is recorded of it."""
        self._encoding = 0
        self.call_trace: CallTrace = NO_CALL_TRACE

    def _settle_work(self) -> bool:
        """Let go of frames that have been decoded."""
        moved = False
        while self._working and self._working[0][0].done():
            pending, frame, (posted, plain, lane, chunk) = self._working.popleft()
            pending.result()
            if frame is not None:
                self.call_trace.coded(DECODE, posted, frame.nbytes, plain, lane, chunk)
                frame.release()
            moved = True
        return moved

    def _lands(self, number: int, index: int, chunk: int) -> Place | None:
        """Return where a message can be received without further ado: nothing was there, and nothing follows it."""
        step = self._program.lanes[number].steps[index]
        if not self._in_place or step.kind not in ("r", "rcs") or step.target is None or step.target.buffer == "s":
            return None
        version = self._versions.written[number, index][chunk]
        return (
            Place(step.target.buffer, step.target.offset + chunk) if version.first_write and version.persists else None
        )

    def _room(self, state: LaneState) -> Frame | None:
        """Return room for the next message: its place in the output, or a frame if there is one to be had."""
        loop, place = state.next_landing()
        if place is not None:
            return Frame(_memory(self._layout.elements(place.buffer, place.offset, loop)))
        return state.staging.take() if state.staging.available() else None

    def _walk(self, number: int, state: LaneState) -> Moves:
        for loop in range(self._layout.loops):
            for index, step in enumerate(state.lane.steps):
                for other, at in step.after:
                    yield self._reached(other, loop * len(self._program.lanes[other].steps) + at + 1)
                for chunk in range(step.count):
                    yield from self._take(state, step, (number, index), chunk, loop)
                self._finished[number] += 1
            self._end_loop(loop)

    def _reached(self, lane: int, steps: int) -> Ready:
        return lambda: self._finished[lane] >= steps

    def _end_loop(self, loop: int) -> None:
        """Give scratch back when the last lane leaves a loop."""
        pairs = zip(self._finished, self._program.lanes, strict=True)
        if self._scratch and all(done >= (loop + 1) * len(lane.steps) for done, lane in pairs):
            self._scratch.end(loop)

    def _take(self, state: LaneState, step: Step, key: tuple[int, int], chunk: int, loop: int) -> Moves:
        """Do one chunk of a step."""
        place = step.target or step.source
        state.chunk = place.offset + chunk if place else chunk
        relayed = (yield from self._relay(state)) if step.kind == "rcs" else False
        frame = (yield from self._receive(state, loop)) if step.receives else None
        if step.kind == "s":
            source = self._at(step.source, chunk, loop)
            yield from self._send_version(state, self._versions.read[key][chunk], loop, source)
        elif step.kind in ("r", "rcs") and frame:
            self._keep(self._versions.written[key][chunk], loop, frame, plain=self._comes_plain[key[0]])
            if step.sends and not relayed:
                self._wire.post(state, frame.hold())
            self._decode(state, frame, self._for_frame(step.target, chunk, loop, frame), "replace", loop)
        elif frame:
            yield from self._reduce(state, step, key, chunk, loop, frame)
        elif step.kind in ("cpy", "re"):
            self._locally(step, chunk, loop)

    def _relay(self, state: LaneState) -> Generator[Ready, None, bool]:
        """Send the next message of a lane on while it arrives, where that can be; say whether it is."""
        if not state.has_begun():
            state.wait_from_now()
            yield state.has_begun
        return self._wire.relay(state)

    def _receive(self, state: LaneState, loop: int) -> Generator[Ready, None, Frame]:
        """Wait for the next message of a lane, and open it."""
        if not state.has_message():
            state.wait_from_now()
            yield state.has_message  # not of one transfer: a task that was suspended listens with another
        frame = self._wire.take(state)
        if not self._plain:
            frame.header = self._coder.open(frame.filled(), self._where(state, loop))
            _check_sequence(frame.header, loop, self._where(state, loop))
        return frame

    def _send_version(self, state: LaneState, version: ChunkValue, loop: int, source: Buffer) -> Moves:
        """Send a chunk in the frame that it came in or that another lane has made, or make one."""
        key, uses = (loop, version, state.lane.raw), version.sends_as(state.lane.raw)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _Shared(uses)
            if self._in_place and version.initial and version.persists:
                frame = Frame(_memory(source))
                frame.nbytes = source.nbytes
            else:
                settle = self._settles and (version.final or self._root_too)
                frame = yield from self._encode(state, source, loop, settle=settle)
            shared.frame = frame.hold(uses - 1)
        elif shared.frame is None:
            yield lambda: shared.frame is not None
        assert shared.frame is not None
        if not state.may_send():
            yield state.may_send
        self._wire.post(state, shared.frame)
        shared.left -= 1
        if not shared.left:
            del self._shared[key]

    def _keep(self, version: ChunkValue, loop: int, frame: Frame, *, plain: bool) -> None:
        """Keep a frame for those who will send the same chunk in the same form."""
        uses = version.sends_as(plain)
        if uses:
            self._shared[loop, version, plain] = _Shared(uses, frame.hold(uses))

    def _encode(self, state: LaneState, source: Buffer, loop: int, *, settle: bool) -> Generator[Ready, None, Frame]:
        if not state.staging.available():
            yield state.staging.available
        frame = state.staging.take()
        self._encoding += 1
        posted, coder, raw = perf_counter_ns(), self._coder, state.lane.raw
        coding = coder.copy(source, frame.memory) if self._plain else coder.encode(source, frame.memory, loop, raw=raw)
        frame.nbytes = yield from coding
        self._encoding -= 1
        self.call_trace.coded(ENCODE, posted, frame.nbytes, source.nbytes, state.number, loop)
        if settle:
            frame.header = self._coder.header(frame.filled(), self._where(state, loop))
            self._decode(state, frame.hold(), source, "replace", loop)
        return frame

    def _decode(self, state: LaneState, frame: Frame, to: Buffer, op: str, loop: int) -> None:
        """Queue the decoding of a frame, which then lets go of it."""
        where, posted = self._where(state, loop), perf_counter_ns()
        if self._plain:
            _check_length(frame, to, where)
            if frame.in_place:
                return
            pending = self._coder.place(frame.filled(), to, op)
        else:
            assert frame.header is not None
            pending = self._coder.decode(frame.header, frame.filled(), to, op, loop, where)
        self._working.append((pending, frame, (posted, to.nbytes, state.number, loop)))

    def _reduce(self, state: LaneState, step: Step, key: tuple[int, int], chunk: int, loop: int, frame: Frame) -> Moves:
        """Reduce what has arrived with what is here; keep the result, send it, or both."""
        source, stream = self._at(step.source, chunk, loop), self._coder.stream
        temporary = stream.device.alloc(source.nbytes) if step.kind == "rrs" else None
        target = _elements(temporary, source) if temporary else self._at(step.target, chunk, loop, like=source)
        if target.address != source.address:
            stream.copy(target.address, source.address, source.nbytes)
        self._decode(state, frame, target, self._op, loop)
        if step.sends:
            version = self._versions.written[key][chunk] if step.target and not temporary else ChunkValue(final=False)
            out = yield from self._encode(state, target, loop, settle=self._settles and version.final)
            self._keep(version, loop, out, plain=state.lane.raw)
            self._wire.post(state, out)
        if temporary:
            stream.release(temporary)

    def _locally(self, step: Step, chunk: int, loop: int) -> None:
        source = self._at(step.source, chunk, loop)
        target = self._at(step.target, chunk, loop, like=source)
        if step.kind == "cpy":
            self._coder.stream.copy(target.address, source.address, source.nbytes)
        elif source.count:
            kernel, tiles = f"reduce_{self._dtype.suffix}", -(-source.count // REDUCE_TILE)
            self._coder.stream.launch(kernel, tiles, target.address, source.address, source.count, OPS[self._op])
        self._watch()

    def _watch(self) -> None:
        """Notice if the work just queued is skipped, because other work on the stream, which is shared, has failed."""
        event = self._coder.stream.record()
        self._working.append((Pending(event.done, event.wait), None, (0, 0, 0, 0)))

    def _at(self, place: Place | None, chunk: int, loop: int, *, like: Buffer | None = None) -> Buffer:
        """Return the elements of a chunk; scratch that is written is made as long as what it is written from."""
        assert place is not None
        if place.buffer != "s":
            return self._layout.elements(place.buffer, place.offset + chunk, loop)
        if like is not None:
            return self._scratch.write(loop, place.offset + chunk, like.count)
        return self._scratch.read(loop, place.offset + chunk)

    def _for_frame(self, place: Place | None, chunk: int, loop: int, frame: Frame) -> Buffer:
        """Return where a frame is decoded to; scratch is made as long as the frame says."""
        assert place is not None
        if place.buffer != "s":
            return self._layout.elements(place.buffer, place.offset + chunk, loop)
        count = (frame.header.decoded_bytes if frame.header else frame.nbytes) // self._dtype.itemsize
        if count > self._layout.piece:
            raise FrameError(
                f"{self.title}, chunk {place.offset + chunk} of loop {loop}",
                expected=f"a chunk of at most {self._layout.piece} elements",
                got=f"{count}",
                remedy="Pass the same count and chunk on every rank.",
                rank=self._rank,
            )
        return self._scratch.write(loop, place.offset + chunk, count)

    def _where(self, state: LaneState, loop: int) -> str:
        chunk = f"chunk {state.chunk} of loop {loop}"
        return f"rank {self._rank}: {self.title}, {chunk}, from rank {state.lane.receive}"


def _comes_plain(algorithm: Algorithm, rank: int) -> list[bool]:
    """Say for each lane whether what it receives was sent as it is, and not encoded."""
    plain = {
        (sender, lane.channel)
        for sender, program in enumerate(algorithm.programs)
        for lane in program.lanes
        if lane.raw and lane.send == rank
    }
    return [(lane.receive, lane.channel) in plain for lane in algorithm.programs[rank].lanes]


def _check_sequence(header: FrameHeader, loop: int, where: str) -> None:
    """Raise if a frame comes in another's place; before it is sent on, so that nobody else has to find it."""
    if header.sequence != loop:
        raise FrameError(
            where,
            expected=f"a frame of loop {loop}",
            got=f"one of loop {header.sequence}",
            remedy="A message was lost, repeated or overtaken on its way.",
        )


def _check_length(frame: Frame, to: Buffer, where: str) -> None:
    if frame.nbytes != to.nbytes:
        raise FrameError(
            where,
            expected=f"{to.nbytes} bytes of {to.dtype}",
            got=f"{frame.nbytes}",
            remedy="Pass the same count and type on every rank.",
        )


def _memory(elements: Buffer) -> Memory:
    """Describe the caller's elements as memory for messages."""
    return Memory(elements.address, elements.nbytes, HOST, elements.owner)


def _elements(memory: Memory, like: Buffer) -> Buffer:
    return Buffer(memory.address, like.dtype, (like.count,), device=memory.device.name, owner=memory)


class Task(Steps):
    """A collective on its way."""

    def __init__(
        self,
        algorithm: Algorithm,
        layout: Layout,
        dtype: DType,
        coder: Coder,
        transport: Transport,
        tag: int,
        *,
        name: str,
        before: StreamWork | None = None,
        after: StreamWork | None = None,
        **how: Unpack[How],
    ) -> None:
        """Take part as `Steps` says; `before` and `after` queue work on the stream ahead of everything, and behind."""
        _check_channels(algorithm, transport.rank)
        super().__init__(algorithm, layout, dtype, coder, transport, tag, name=name, **how)
        self.name, self.tag = name, tag
        self.peer_tags, self.sent = self._wire.peer_tags, self._wire.sent
        self._end: Event | None = None
        self.done = False
        """Whether every lane has come to its end, all work is done, and the caller may use the buffers."""
        self._before, self._after = before, after

    @property
    def longest(self) -> int:
        """Return the length of the longest block that this rank knows of."""
        return self._layout.longest

    def prepare(self, longest: int) -> None:
        """Get ready to move, now that the length of the longest block of all ranks is known."""
        self._layout.stretch(longest)
        self._wire.call_trace = self.call_trace
        if self._before is not None:
            self._before(self._coder.stream)
            self._watch()
        self._wire.lanes[:] = [self._prepared(number) for number in range(len(self._program.lanes))]

    def _prepared(self, number: int) -> LaneState:
        lane = self._program.lanes[number]
        kept = self._versions.shared_frames(number)
        room = self._coder.room(self._layout.piece, self._dtype)
        # Frames that wait for other lanes must not take the place of those that would let them go on.
        staging = Staging(self._coder.memory, room, 2 * AHEAD + kept)
        landings = [
            self._lands(number, index, chunk)
            for index, step in enumerate(lane.steps)
            if step.receives
            for chunk in range(step.count)
        ]
        state = LaneState(lane, staging, self._layout.loops, landings)
        state.moves, state.number = self._walk(number, state), number & 0xFF
        return state

    @property
    def neighbours(self) -> frozenset[int]:
        """Return the ranks that it sends to or receives from."""
        peers = {peer for lane in self._program.lanes for peer in (lane.send, lane.receive) if peer is not None}
        return frozenset(peers)

    @property
    def busy(self) -> bool:
        """Say whether it has work of its own under way, and so does not (only) wait for a peer."""
        return bool(self._working or self._encoding or self._end)

    def move(self) -> bool:
        """Go on as far as possible without waiting; say whether anything has moved."""
        moved = self._settle_work()
        for state in self._wire.lanes:
            moved |= self._wire.settle(state)
            self._wire.listen(state, self._room)
            while state.ready is not None and state.ready():
                state.ready = next(state.moves, None)
                moved = True
        return self._finish() or moved

    def _finish(self) -> bool:
        """Notice the end: nothing under way, and the stream through with what was queued, copies too."""
        if self.done or self._working or any(state.ready or state.leaving for state in self._wire.lanes):
            return False
        if self._end is None:
            if self._after is not None:
                self._after(self._coder.stream)
            self._end = self._coder.stream.record()
        if self._end.done():
            self._end.wait()
            self.done = True
        return self.done

    def in_flight(self) -> list[InFlight]:
        """Return the chunks that are on the wire or waited for."""
        return list(self._wire.in_flight())

    def suspend(self) -> None:
        """Give back the memory that only waits for messages; what has arrived or is leaving stays."""
        self._wire.suspend()

    def abandon(self) -> None:
        """Give up after a failure: stop listening, encode and send nothing more."""
        self.suspend()
        self._end = self._coder.stream.record()

    def halt(self) -> None:
        """Wait for the work that is queued: from then on no stream touches the caller's buffers."""
        with suppress(Exception):  # what went wrong is known
            self._coder.stream.record().wait()

    def wind_down(self, owed: Mapping[tuple[int, int], int]) -> bool:
        """Let what is under way come to its end, and throw away what peers have sent (`owed`, by peer and channel).

        Say whether nothing is left. Only then is the memory given back: until then the wire or the stream may use it.
        """
        assert self._end is not None, "abandon first"
        if not self._wire.wind_down(owed) or not self._end.done():
            return False
        with suppress(Exception):
            self._end.wait()  # or what went wrong here and nobody has asked for would meet the next one on this stream
        self._wire.reclaim()
        self._scratch.reclaim()
        return True


def _check_channels(algorithm: Algorithm, rank: int) -> None:
    channels = 1 + max((lane.channel for lane in algorithm.programs[rank].lanes), default=0)
    if channels > CHANNELS:
        raise ScheduleError(
            f"algorithm {algorithm.name}",
            expected=f"at most {CHANNELS} channels",
            got=f"{channels}",
            remedy="Let lanes that go to different peers share a channel.",
            rank=rank,
        )
