"""A simulated lane: the rules of the engine (`engine.task`), with time instead of data.

A lane waits for the dependencies of its steps, for messages, for what it encodes, and for room in its connection. It
does not wait for what it decodes, nor for its messages to leave. A chunk is encoded once however often it is sent, and
forwarded without recoding; between nodes it is relayed while it arrives. Without a codec, elements are sent from and
received into the caller's buffers, unless the place is in use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.simulate.resources import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from mpi_gpucomp.schedule.cost import CodecCost
    from mpi_gpucomp.schedule.dataflow import ChunkValue, Dataflow
    from mpi_gpucomp.schedule.ir import Lane, Step
    from mpi_gpucomp.schedule.simulate.resources import Connection, EventQueue, Interconnect, RankQueue

    Waiting = Generator[None, None, None]

__all__ = ["LaneRun", "RankState"]


class _SimulatedFrame:
    """A frame that several sends share."""

    __slots__ = ("cause", "left", "on_ready", "ready")

    def __init__(self, sends: int) -> None:
        self.left, self.ready, self.cause = sends, False, -1
        self.on_ready: list[Callable[[], None]] = []


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
    finished: list[int] = field(default_factory=list)
    """Completed steps of each lane, over all loops."""
    causes: list[int] = field(default_factory=list)
    """The record that each lane's last step followed from."""
    waiting: dict[int, list[Callable[[], None]]] = field(default_factory=dict)
    """What to resume when a lane completes a step."""
    frames: dict[tuple[int, ChunkValue, bool], _SimulatedFrame] = field(default_factory=dict)
    """Shared frames, by loop, value and whether they are raw."""


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
            yield from self._send_value(rank.dataflow.read[key][chunk], loop)
        elif kind in ("r", "rcs"):
            value = rank.dataflow.written[key][chunk]
            self._share_frame(value, loop, self._receives_raw)
            if step.sends and not relayed:
                yield from self._post(loop, self._receive_cost)
            in_user_buffer = step.target is not None and step.target.buffer != "s"
            if not (rank.no_codec and value.first_write and value.persists and in_user_buffer):
                self._queue("decode", loop, self._receive_cost.decode)
        elif step.receives:
            yield from self._reduce(step, key, chunk, loop)
        elif kind in ("cpy", "re"):
            self._queue("copy" if kind == "cpy" else "reduce", loop, rank.costs[1].decode if rank.no_codec else 0.0)

    def _reduce(self, step: Step, key: tuple[int, int], chunk: int, loop: int) -> Waiting:
        self._queue("reduce", loop, self._receive_cost.decode)
        if step.sends:
            yield from self._encode(loop)
            if step.target is not None:
                self._share_frame(self._rank.dataflow.written[key][chunk], loop, self._sends_raw)
            yield from self._post(loop, self._send_cost)

    def _send_value(self, value: ChunkValue, loop: int) -> Waiting:
        """Send a chunk in the frame that it arrived in or that another lane has encoded, or encode it."""
        rank, key = self._rank, (loop, value, self._sends_raw)
        frame = rank.frames.get(key)
        if frame is None:
            frame = rank.frames[key] = _SimulatedFrame(value.sends_as(self._sends_raw))
            if not (rank.no_codec and value.initial and value.persists):
                yield from self._encode(loop)
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

    def _encode(self, loop: int) -> Waiting:
        """Wait until a chunk is encoded, or copied to where it can be sent from."""
        work = self._queue("encode", loop, self._send_cost.encode)
        events, wait = self._rank.events, self._rank.network.message_cost.wait
        # An encoded frame is noticed no sooner than an arrived message.
        work.on_done = (lambda: events.at(events.now + wait, self.resume)) if wait else self.resume
        while not work.done or events.now < work.ended + wait:
            yield
        self._cause = work.number

    def _queue(self, kind: str, loop: int, per_byte: float) -> Work:
        rank, nbytes = self._rank, self._rank.chunk_bytes[loop]
        seconds = nbytes * per_byte + (0.0 if rank.no_codec else rank.network.message_cost.frame)
        work = Work(kind, loop, nbytes, seconds, self._cause)
        rank.coder.add(work)
        return work

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
