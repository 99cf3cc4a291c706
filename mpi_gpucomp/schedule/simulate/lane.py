"""A simulated lane: the rules of the engine (`engine.task`), with time instead of data.

A lane waits for the dependencies of its steps, for messages, for what it encodes, and for room in its connection. It
does not wait for what it decodes, nor for its messages to leave. A chunk is encoded once however often it is sent, and
forwarded without recoding; between nodes it is relayed while it arrives. Without a codec, elements are sent from and
received into the caller's buffers, unless the place is in use.

On GPUs a chunk is copied to host memory after its encoding and from there before its decoding, beside the kernels, and
a few chunks are encoded before their sends are due.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.simulate.resources import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from mpi_gpucomp.schedule.cost import CodecCost, StagingCost
    from mpi_gpucomp.schedule.dataflow import ChunkValue, Dataflow
    from mpi_gpucomp.schedule.ir import Lane, Step
    from mpi_gpucomp.schedule.simulate.resources import Connection, EventQueue, Interconnect, RankQueue

    Waiting = Generator[None, None, None]
    Stage = tuple[RankQueue, Work]

__all__ = ["CopyQueues", "LaneRun", "RankState"]

PREFETCH = 3
"""Chunks on a GPU that are encoded before their send is due, as in the core."""


class _SimulatedFrame:
    """A frame that several sends share."""

    __slots__ = ("cause", "left", "on_ready", "ready")

    def __init__(self, sends: int) -> None:
        self.left, self.ready, self.cause = sends, False, -1
        self.on_ready: list[Callable[[], None]] = []


@dataclass(frozen=True)
class CopyQueues:
    """The copies between a GPU and the host: a queue for each direction."""

    cost: StagingCost
    out: RankQueue
    back: RankQueue


@dataclass
class RankState:
    """The state that the lanes of one rank share."""

    events: EventQueue
    lanes: Sequence[Lane]
    dataflow: Dataflow
    coder: RankQueue
    network: Interconnect
    chunk_bytes: Sequence[float]
    """Raw bytes of a chunk in each loop."""
    costs: tuple[CodecCost, CodecCost]
    """Of encoded and of raw chunks."""
    no_codec: bool
    """True if nothing is encoded, so that there are no frames."""
    copies: CopyQueues | None = None
    """Of elements on a GPU."""
    finished: list[int] = field(default_factory=list)
    """Completed steps of each lane, over all loops."""
    causes: list[int] = field(default_factory=list)
    """The record that each lane's last step followed from."""
    waiting: dict[int, list[Callable[[], None]]] = field(default_factory=dict)
    """What to resume when a lane completes a step."""
    frames: dict[tuple[int, ChunkValue, bool], _SimulatedFrame] = field(default_factory=dict)
    """Shared frames, by loop, value and whether they are raw."""
    encoded_ahead: dict[tuple[int, ChunkValue, bool], Work] = field(default_factory=dict)
    """Chunks that are encoded before their send is due."""

    def staged(self, raw: bool) -> CopyQueues | None:
        """Return the copies that messages need."""
        return self.copies if self.copies and (self.copies.cost.raw or not (raw or self.no_codec)) else None


class LaneRun:
    """The run of one lane through all loops."""

    def __init__(self, rank: RankState, number: int, outgoing: Connection | None, incoming: Connection | None) -> None:
        """Start before the first step."""
        self._rank, self._number, self._lane = rank, number, rank.lanes[number]
        self._out, self._in = outgoing, incoming
        self._sends_raw = self._lane.raw
        self._send_cost = rank.costs[rank.no_codec or self._sends_raw]
        self._receives_raw = incoming is not None and incoming.raw
        self._receive_cost = rank.costs[rank.no_codec or self._receives_raw]
        self._chunks = [(at, chunk) for at, step in enumerate(self._lane.steps) for chunk in range(step.count)]
        self._cause = -1
        self._steps = self._run()
        if incoming is not None:
            incoming.on_arrival = self.resume

    def resume(self) -> None:
        """Advance until the lane waits; has no effect if its condition does not hold yet."""
        next(self._steps, None)

    def _run(self) -> Waiting:
        rank, number = self._rank, self._number
        for loop in range(len(rank.chunk_bytes)):
            for index, step in enumerate(self._lane.steps):
                for other, at in step.after:
                    yield from self._wait_for_lane(other, loop * len(rank.lanes[other].steps) + at + 1)
                for chunk in range(step.count):
                    yield from self._run_chunk(step, (number, index), chunk, loop)
                rank.finished[number] += 1
                rank.causes[number] = self._cause
                for resume in rank.waiting.pop(number, ()):
                    rank.events.at(rank.events.now, resume)

    def _wait_for_lane(self, lane: int, steps: int) -> Waiting:
        rank = self._rank
        while rank.finished[lane] < steps:
            rank.waiting.setdefault(lane, []).append(self.resume)
            yield
            self._cause = rank.causes[lane]

    def _run_chunk(self, step: Step, key: tuple[int, int], chunk: int, loop: int) -> Waiting:
        rank, kind = self._rank, step.kind
        relayed = (yield from self._relay(loop)) if kind == "rcs" else False
        if step.receives:
            assert self._in is not None
            while not (self._in.inbox and self._in.inbox[0].delivered):
                yield
            self._cause = rank.network.take(self._in)
        if kind == "s":
            yield from self._send_value(key[1], chunk, loop)
        elif kind in ("r", "rcs"):
            value = rank.dataflow.written[key][chunk]
            self._share_frame(value, loop, self._receives_raw)
            if step.sends and not relayed:
                yield from self._post(loop, self._receive_cost)
            in_user_buffer = step.target is not None and step.target.buffer != "s"
            in_place = rank.no_codec and value.first_write and value.persists and in_user_buffer
            decode = () if in_place else (self._coding("decode", loop, self._receive_cost.decode),)
            if stages := (*self._copy_in(loop), *decode):
                self._queue(*stages)
        elif step.receives:
            yield from self._reduce(step, key, chunk, loop)
        elif kind in ("cpy", "re"):
            per_byte = rank.costs[1].decode if rank.no_codec else 0.0
            self._queue(self._coding("copy" if kind == "cpy" else "reduce", loop, per_byte))

    def _reduce(self, step: Step, key: tuple[int, int], chunk: int, loop: int) -> Waiting:
        reduce = *self._copy_in(loop), self._coding("reduce", loop, self._receive_cost.decode)
        if not step.sends:
            self._queue(*reduce)
        else:
            yield from self._wait_for_frame(self._queue(*reduce, *self._frame_stages(loop)))
            if step.target is not None:
                self._share_frame(self._rank.dataflow.written[key][chunk], loop, self._sends_raw)
            yield from self._post(loop, self._send_cost)

    def _send_value(self, index: int, chunk: int, loop: int) -> Waiting:
        """Send a chunk in the frame that it arrived in or that another lane has encoded, or encode it."""
        rank, value = self._rank, self._rank.dataflow.read[self._number, index][chunk]
        key = loop, value, self._sends_raw
        frame = rank.frames.get(key)
        if frame is None:
            frame = rank.frames[key] = _SimulatedFrame(value.sends_as(self._sends_raw))
            if rank.staged(self._sends_raw) or not (rank.no_codec and value.initial and value.persists):
                self._encode_ahead(index, chunk, loop)
                work = rank.encoded_ahead.pop(key, None) or self._queue(*self._frame_stages(loop))
                yield from self._wait_for_frame(work)
            frame.ready, frame.cause = True, self._cause
            for resume in frame.on_ready:
                rank.events.at(rank.events.now, resume)
        while not frame.ready:
            frame.on_ready.append(self.resume)
            yield
        self._cause = max(self._cause, frame.cause)
        yield from self._post(loop, self._send_cost)
        frame.left -= 1
        if not frame.left:
            del rank.frames[key]

    def _share_frame(self, value: ChunkValue, loop: int, raw: bool) -> None:
        """Keep a frame for later sends of its value."""
        if value.sends_as(raw):
            frame = self._rank.frames[loop, value, raw] = _SimulatedFrame(value.sends_as(raw))
            frame.ready, frame.cause = True, self._cause

    def _encode_ahead(self, index: int, chunk: int, loop: int) -> None:
        """Queue the encoding of this chunk and of those to send next: on a GPU, of elements that are there already."""
        rank, at = self._rank, self._chunks.index((index, chunk))
        if rank.copies is None:
            return
        first = True
        for _ in range(PREFETCH + 1):
            index, chunk = self._chunks[at]
            read = rank.dataflow.read.get((self._number, index))
            if self._lane.steps[index].kind != "s" or read is None or not read[chunk].initial:
                return
            key = loop, read[chunk], self._sends_raw
            if key not in rank.encoded_ahead and (first or key not in rank.frames):
                rank.encoded_ahead[key] = self._queue(*self._frame_stages(loop))
            first = False
            at, loop = (at + 1, loop) if at + 1 < len(self._chunks) else (0, loop + 1)
            if loop == len(rank.chunk_bytes):
                return

    def _wait_for_frame(self, work: Work) -> Waiting:
        """Wait until a chunk is encoded, or copied to where it can be sent from."""
        events, wait = self._rank.events, self._rank.network.message_cost.wait
        # An encoded frame is noticed no sooner than an arrived message.
        if not work.done:
            work.on_done = (lambda: events.at(events.now + wait, self.resume)) if wait else self.resume
        elif wait:
            events.at(max(events.now, work.ended + wait), self.resume)
        while not work.done or events.now < work.ended + wait:
            yield
        self._cause = work.number

    def _frame_stages(self, loop: int) -> tuple[Stage, ...]:
        """Return the stages that bring a chunk to where it can be sent from."""
        copies, nbytes = self._rank.staged(self._sends_raw), self._rank.chunk_bytes[loop] / self._send_cost.ratio
        if copies is None:
            return (self._coding("encode", loop, self._send_cost.encode),)
        out = copies.out, Work("stage", loop, nbytes, copies.cost.seconds(nbytes), self._cause)
        return (out,) if self._rank.no_codec else (self._coding("encode", loop, self._send_cost.encode), out)

    def _copy_in(self, loop: int) -> tuple[Stage, ...]:
        """Return the stage that brings a frame to the GPU, if there is one."""
        copies, nbytes = self._rank.staged(self._receives_raw), self._rank.chunk_bytes[loop] / self._receive_cost.ratio
        if copies is None:
            return ()
        return ((copies.back, Work("stage", loop, nbytes, copies.cost.seconds(nbytes), self._cause)),)

    def _coding(self, kind: str, loop: int, per_byte: float) -> Stage:
        rank, nbytes = self._rank, self._rank.chunk_bytes[loop]
        seconds = nbytes * per_byte + (0.0 if rank.no_codec else rank.network.message_cost.frame)
        return rank.coder, Work(kind, loop, nbytes, seconds, self._cause)

    @staticmethod
    def _queue(*stages: Stage) -> Work:
        """Queue stages, each after the one before it; return the last."""
        _add(stages)
        return stages[-1][1]

    def _relay(self, loop: int) -> Generator[None, None, bool]:
        """Relay the next message while it arrives; return False if it has arrived before that is possible."""
        assert self._in is not None and self._out is not None
        while not self._in.inbox or not (self._in.inbox[0].delivered or self._out.room):
            self._out.on_room = self.resume
            yield
        message = self._in.inbox[0]
        if not message.delivered:
            self._rank.network.post(self._out, message.nbytes, loop, self._cause, message)
        return not message.delivered

    def _post(self, loop: int, cost: CodecCost) -> Waiting:
        """Post a chunk as soon as the connection has room."""
        assert self._out is not None
        rank = self._rank
        while not self._out.room:
            self._out.on_room = self.resume
            yield
        rank.network.post(self._out, rank.chunk_bytes[loop] / cost.ratio, loop, self._cause)


def _add(stages: Sequence[Stage]) -> None:
    """Queue the first stages, which use the same queue, and the others when those are done."""
    same = list(takewhile(lambda stage: stage[0] is stages[0][0], stages))
    if rest := stages[len(same) :]:
        same[-1][1].on_done = partial(_add_after, same[-1][1], rest)
    for queue, work in same:
        queue.add(work)


def _add_after(before: Work, stages: Sequence[Stage]) -> None:
    stages[0][1].cause = before.number
    _add(stages)
