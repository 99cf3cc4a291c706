"""One running collective: executes this rank's program of a schedule, lane by lane.

A lane is a generator that yields the condition it waits for. So its position is kept by itself: a task that is not
progressed stays where it is, and continues from there.
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
from mpi_gpucomp.engine.staging import Scratch, Slot, Staging
from mpi_gpucomp.errors import FrameError, ScheduleError
from mpi_gpucomp.schedule.dataflow import ChunkValue, dataflow
from mpi_gpucomp.schedule.ir import Place
from mpi_gpucomp.trace import DECODE, ENCODE, NO_CALL_TRACE, CallTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from typing_extensions import Unpack

    from mpi_gpucomp.codec.frame import FrameHeader
    from mpi_gpucomp.device import DType, Event, Stream
    from mpi_gpucomp.engine.coder import Coder
    from mpi_gpucomp.engine.layout import Layout
    from mpi_gpucomp.schedule.ir import Algorithm, Step
    from mpi_gpucomp.trace import InFlight
    from mpi_gpucomp.transport.base import Transport

    Ready = Callable[[], bool]
    Moves = Generator[Ready, None, None]
    StreamWork = Callable[[Stream], None]

__all__ = ["CollectiveTask", "TaskOptions"]


class TaskOptions(TypedDict, total=False):
    """Options of a task."""

    op: str
    same_everywhere: bool
    """Whether a rank that sends a final value replaces its own by the decoded one."""
    update_root: bool
    """Whether the root of a broadcast does so too, whose buffer a schedule leaves alone otherwise."""
    raw: bool
    """Whether elements are sent without frames and codec, in place where possible."""


class _SharedSlot:
    """A frame that several sends use, or will use once it is encoded."""

    __slots__ = ("left", "slot")

    def __init__(self, uses: int, slot: Slot | None = None) -> None:
        self.left, self.slot = uses, slot


class CollectiveTask:
    """A collective in progress."""

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
        **options: Unpack[TaskOptions],
    ) -> None:
        """Execute this rank's program; `before` and `after` queue work on the stream, first and last."""
        _check_channels(algorithm, transport.rank)
        rank = transport.rank
        self.name, self.tag = name, tag
        self.title = name
        """Its name in errors; the engine sets it to the title of the call."""
        self._io = LaneIO(transport, tag)
        self.peer_tags, self.sent = self._io.peer_tags, self._io.sent
        self._program, self._layout, self._dtype = algorithm.programs[rank], layout, dtype
        self._coder, self._rank, self._op = coder, rank, options.get("op", "sum")
        self._values = dataflow(algorithm, rank)
        self._receives_raw = _receives_raw(algorithm, rank)
        self._raw, self._update_root = options.get("raw", False), options.get("update_root", False)
        self._in_place = self._raw and coder.works_in_place
        self._updates_own = (options.get("same_everywhere", False) or self._update_root) and not coder.codec.lossless
        self._finished = [0] * len(self._program.lanes)
        self._shared: dict[tuple[int, ChunkValue, bool], _SharedSlot] = {}
        self._scratch = Scratch(coder.stream, dtype, layout.chunk)
        self._decoding: deque[tuple[Pending, Slot | None, tuple[int, int, int, int]]] = deque()
        """Chunks being decoded or copied, their slots, and the fields of their trace records."""
        self._encoding = 0
        self._end: Event | None = None
        self._before, self._after = before, after
        self.done = False
        """Whether all lanes and all queued work have completed, and the caller may use the buffers."""
        self.call_trace: CallTrace = NO_CALL_TRACE

    @property
    def longest(self) -> int:
        """Return the length of the longest block that this rank knows of."""
        return self._layout.longest

    @property
    def neighbours(self) -> frozenset[int]:
        """Return the ranks that it sends to or receives from."""
        peers = {peer for lane in self._program.lanes for peer in (lane.send, lane.receive) if peer is not None}
        return frozenset(peers)

    @property
    def busy(self) -> bool:
        """Return True if local work is in progress, so that it does not only wait for a peer."""
        return bool(self._decoding or self._encoding or self._end)

    def prepare(self, longest: int) -> None:
        """Prepare the lanes, now that the length of the longest block of all ranks is known."""
        self._layout.set_longest(longest)
        self._io.call_trace = self.call_trace
        if self._before is not None:
            self._before(self._coder.stream)
            self._check_queued()
        self._io.lanes[:] = [self._lane_state(number) for number in range(len(self._program.lanes))]

    def _lane_state(self, number: int) -> LaneState:
        lane = self._program.lanes[number]
        shared = self._values.shared_frames(number)
        slot_bytes = self._coder.room(self._layout.chunk, self._dtype)
        # Frames kept for other lanes must not take the slots of those that would let them progress.
        staging = Staging(self._coder.memory, slot_bytes, 2 * AHEAD + shared)
        targets = [
            self._zero_copy_target(number, index, chunk)
            for index, step in enumerate(lane.steps)
            if step.receives
            for chunk in range(step.count)
        ]
        state = LaneState(lane, staging, self._layout.loops, targets)
        state.moves, state.number = self._run_lane(number, state), number & 0xFF
        return state

    def progress(self) -> bool:
        """Progress all lanes as far as possible without blocking; return True if anything progressed."""
        moved = self._release_decoded()
        for state in self._io.lanes:
            moved |= self._io.release_sent(state)
            self._io.post_receives(state, self._receive_slot)
            while state.ready is not None and state.ready():
                state.ready = next(state.moves, None)
                moved = True
        return self._check_done() or moved

    def _check_done(self) -> bool:
        """Complete the task once nothing is in flight and the stream has executed all queued work, copies too."""
        if self.done or self._decoding or any(state.ready or state.leaving for state in self._io.lanes):
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
        """Return the transfers that have not completed."""
        return list(self._io.in_flight())

    def suspend(self) -> None:
        """Cancel unmatched receives and return their memory; other transfers continue."""
        self._io.suspend()

    def abandon(self) -> None:
        """Stop after a failure: receive, encode and send nothing more."""
        self.suspend()
        self._end = self._coder.stream.record()

    def quiesce(self) -> None:
        """Wait for the queued work: afterwards no stream accesses the caller's buffers."""
        with suppress(Exception):  # the error is already known
            self._coder.stream.record().wait()

    def drain(self, owed: Mapping[tuple[int, int], int]) -> bool:
        """Complete what is in flight, and drop what peers have sent (`owed`, by peer and channel).

        Return True if nothing is left. Only then is memory returned: the wire or the stream may use it until then.
        """
        assert self._end is not None, "abandon first"
        if not self._io.drain(owed) or not self._end.done():
            return False
        with suppress(Exception):
            self._end.wait()  # clears an error that would otherwise surface in the next task on this stream
        self._io.free()
        self._scratch.free()
        return True

    # Lanes

    def _run_lane(self, number: int, state: LaneState) -> Moves:
        for loop in range(self._layout.loops):
            for index, step in enumerate(state.lane.steps):
                for other, at in step.after:
                    yield self._reached(other, loop * len(self._program.lanes[other].steps) + at + 1)
                for chunk in range(step.count):
                    yield from self._run_step(state, step, (number, index), chunk, loop)
                self._finished[number] += 1
            self._end_loop(loop)

    def _reached(self, lane: int, steps: int) -> Ready:
        return lambda: self._finished[lane] >= steps

    def _end_loop(self, loop: int) -> None:
        """Release scratch when the last lane leaves a loop."""
        pairs = zip(self._finished, self._program.lanes, strict=True)
        if self._scratch and all(done >= (loop + 1) * len(lane.steps) for done, lane in pairs):
            self._scratch.end(loop)

    def _run_step(self, state: LaneState, step: Step, key: tuple[int, int], chunk: int, loop: int) -> Moves:
        """Execute a step for one chunk."""
        place = step.target or step.source
        state.chunk = place.offset + chunk if place else chunk
        relayed = (yield from self._relay(state)) if step.kind == "rcs" else False
        slot = (yield from self._receive(state, loop)) if step.receives else None
        if step.kind == "s":
            source = self._elements_at(step.source, chunk, loop)
            yield from self._send(state, self._values.read[key][chunk], loop, source)
        elif step.kind in ("r", "rcs") and slot:
            self._share(self._values.written[key][chunk], loop, slot, raw=self._receives_raw[key[0]])
            if step.sends and not relayed:
                self._io.post(state, slot.hold())
            self._decode(state, slot, self._decode_target(step.target, chunk, loop, slot), "replace", loop)
        elif slot:
            yield from self._reduce(state, step, key, chunk, loop, slot)
        elif step.kind in ("cpy", "re"):
            self._run_local(step, chunk, loop)

    def _relay(self, state: LaneState) -> Generator[Ready, None, bool]:
        """Relay the next message of a lane while it arrives, where possible; return True if it is relayed."""
        if not state.has_begun():
            state.wait_from_now()
            yield state.has_begun
        return self._io.relay(state)

    def _receive(self, state: LaneState, loop: int) -> Generator[Ready, None, Slot]:
        """Wait for the next message of a lane, and check its frame."""
        if not state.has_message():
            state.wait_from_now()
            yield state.has_message  # not of one transfer: a suspended task posts another one
        slot = self._io.take(state)
        if not self._raw:
            slot.header = self._coder.open(slot.filled(), self._where(state, loop))
            _check_sequence(slot.header, loop, self._where(state, loop))
        return slot

    def _send(self, state: LaneState, value: ChunkValue, loop: int, source: Buffer) -> Moves:
        """Send a chunk in the frame that it arrived in or that another lane has encoded, or encode it."""
        key, uses = (loop, value, state.lane.raw), value.sends_as(state.lane.raw)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _SharedSlot(uses)
            if self._in_place and value.initial and value.persists:
                slot = Slot(_memory(source))
                slot.nbytes = source.nbytes
            else:
                update = self._updates_own and (value.final or self._update_root)
                slot = yield from self._encode(state, source, loop, update=update)
            shared.slot = slot.hold(uses - 1)
        elif shared.slot is None:
            yield lambda: shared.slot is not None
        assert shared.slot is not None
        if not state.may_send():
            yield state.may_send
        self._io.post(state, shared.slot)
        shared.left -= 1
        if not shared.left:
            del self._shared[key]

    def _share(self, value: ChunkValue, loop: int, slot: Slot, *, raw: bool) -> None:
        """Keep a frame for the lanes that will send the same chunk in the same form."""
        uses = value.sends_as(raw)
        if uses:
            self._shared[loop, value, raw] = _SharedSlot(uses, slot.hold(uses))

    def _encode(self, state: LaneState, source: Buffer, loop: int, *, update: bool) -> Generator[Ready, None, Slot]:
        """Encode a chunk; with `update`, replace it by the decoded values."""
        if not state.staging.available():
            yield state.staging.available
        slot = state.staging.take()
        self._encoding += 1
        posted, coder, raw = perf_counter_ns(), self._coder, state.lane.raw
        coding = coder.copy(source, slot.memory) if self._raw else coder.encode(source, slot.memory, loop, raw=raw)
        slot.nbytes = yield from coding
        self._encoding -= 1
        self.call_trace.coded(ENCODE, posted, slot.nbytes, source.nbytes, state.number, loop)
        if update:
            slot.header = self._coder.header(slot.filled(), self._where(state, loop))
            self._decode(state, slot.hold(), source, "replace", loop)
        return slot

    def _decode(self, state: LaneState, slot: Slot, to: Buffer, op: str, loop: int) -> None:
        """Queue the decoding of a frame, which releases its slot."""
        where, posted = self._where(state, loop), perf_counter_ns()
        if self._raw:
            _check_length(slot, to, where)
            if slot.in_place:
                return
            pending = self._coder.place(slot.filled(), to, op)
        else:
            assert slot.header is not None
            pending = self._coder.decode(slot.header, slot.filled(), to, op, loop, where)
        self._decoding.append((pending, slot, (posted, to.nbytes, state.number, loop)))

    def _release_decoded(self) -> bool:
        """Release the slots of frames that have been decoded."""
        moved = False
        while self._decoding and self._decoding[0][0].done():
            pending, slot, (posted, raw_bytes, lane, chunk) = self._decoding.popleft()
            pending.result()
            if slot is not None:
                self.call_trace.coded(DECODE, posted, slot.nbytes, raw_bytes, lane, chunk)
                slot.release()
            moved = True
        return moved

    def _reduce(self, state: LaneState, step: Step, key: tuple[int, int], chunk: int, loop: int, slot: Slot) -> Moves:
        """Reduce a received chunk with the local one; store the result, send it, or both."""
        source, stream = self._elements_at(step.source, chunk, loop), self._coder.stream
        temporary = stream.device.alloc(source.nbytes) if step.kind == "rrs" else None
        target = _elements(temporary, source) if temporary else self._elements_at(step.target, chunk, loop, like=source)
        if target.address != source.address:
            stream.copy(target.address, source.address, source.nbytes)
        self._decode(state, slot, target, self._op, loop)
        if step.sends:
            value = self._values.written[key][chunk] if step.target and not temporary else ChunkValue(final=False)
            out = yield from self._encode(state, target, loop, update=self._updates_own and value.final)
            self._share(value, loop, out, raw=state.lane.raw)
            self._io.post(state, out)
        if temporary:
            stream.release(temporary)

    def _run_local(self, step: Step, chunk: int, loop: int) -> None:
        """Copy or reduce a local chunk."""
        source = self._elements_at(step.source, chunk, loop)
        target = self._elements_at(step.target, chunk, loop, like=source)
        if step.kind == "cpy":
            self._coder.stream.copy(target.address, source.address, source.nbytes)
        elif source.count:
            kernel, tiles = f"reduce_{self._dtype.suffix}", -(-source.count // REDUCE_TILE)
            self._coder.stream.launch(kernel, tiles, target.address, source.address, source.count, OPS[self._op])
        self._check_queued()

    def _check_queued(self) -> None:
        """Check later that the work just queued was not skipped because other work on the shared stream failed."""
        event = self._coder.stream.record()
        self._decoding.append((Pending(event.done, event.wait), None, (0, 0, 0, 0)))

    # Memory

    def _zero_copy_target(self, number: int, index: int, chunk: int) -> Place | None:
        """Return where a message can be received in place: nothing was written there, and nothing overwrites it."""
        step = self._program.lanes[number].steps[index]
        if not self._in_place or step.kind not in ("r", "rcs") or step.target is None or step.target.buffer == "s":
            return None
        value = self._values.written[number, index][chunk]
        return Place(step.target.buffer, step.target.offset + chunk) if value.first_write and value.persists else None

    def _receive_slot(self, state: LaneState) -> Slot | None:
        """Return the memory for the next message: its place in the output, or a staging slot if one is free."""
        loop, place = state.next_target()
        if place is not None:
            return Slot(_memory(self._layout.elements(place.buffer, place.offset, loop)))
        return state.staging.take() if state.staging.available() else None

    def _elements_at(self, place: Place | None, chunk: int, loop: int, *, like: Buffer | None = None) -> Buffer:
        """Return the elements of a chunk; scratch that is written gets the length of its source."""
        assert place is not None
        if place.buffer != "s":
            return self._layout.elements(place.buffer, place.offset + chunk, loop)
        if like is not None:
            return self._scratch.write(loop, place.offset + chunk, like.count)
        return self._scratch.read(loop, place.offset + chunk)

    def _decode_target(self, place: Place | None, chunk: int, loop: int, slot: Slot) -> Buffer:
        """Return the destination of a frame; scratch gets the frame's length."""
        assert place is not None
        if place.buffer != "s":
            return self._layout.elements(place.buffer, place.offset + chunk, loop)
        count = (slot.header.decoded_bytes if slot.header else slot.nbytes) // self._dtype.itemsize
        if count > self._layout.chunk:
            raise FrameError(
                f"{self.title}, chunk {place.offset + chunk} of loop {loop}",
                expected=f"a chunk of at most {self._layout.chunk} elements",
                got=f"{count}",
                remedy="Pass the same count and chunk on every rank.",
                rank=self._rank,
            )
        return self._scratch.write(loop, place.offset + chunk, count)

    def _where(self, state: LaneState, loop: int) -> str:
        chunk = f"chunk {state.chunk} of loop {loop}"
        return f"rank {self._rank}: {self.title}, {chunk}, from rank {state.lane.receive}"


def _receives_raw(algorithm: Algorithm, rank: int) -> list[bool]:
    """Return for each lane whether it receives raw chunks."""
    raw = {
        (sender, lane.channel)
        for sender, program in enumerate(algorithm.programs)
        for lane in program.lanes
        if lane.raw and lane.send == rank
    }
    return [(lane.receive, lane.channel) in raw for lane in algorithm.programs[rank].lanes]


def _check_channels(algorithm: Algorithm, rank: int) -> None:
    channels = 1 + max((lane.channel for lane in algorithm.programs[rank].lanes), default=0)
    if channels > CHANNELS:
        raise ScheduleError(
            f"algorithm {algorithm.name}",
            expected=f"at most {CHANNELS} channels",
            got=f"{channels}",
            remedy="Use one channel for lanes to different peers.",
            rank=rank,
        )


def _check_sequence(header: FrameHeader, loop: int, where: str) -> None:
    """Raise if a frame is out of sequence; before it is forwarded, so that no later rank has to detect it."""
    if header.sequence != loop:
        raise FrameError(
            where,
            expected=f"a frame of loop {loop}",
            got=f"one of loop {header.sequence}",
            remedy="A message was lost, repeated or reordered.",
        )


def _check_length(slot: Slot, to: Buffer, where: str) -> None:
    if slot.nbytes != to.nbytes:
        raise FrameError(
            where,
            expected=f"{to.nbytes} bytes of {to.dtype}",
            got=f"{slot.nbytes}",
            remedy="Pass the same count and type on every rank.",
        )


def _memory(elements: Buffer) -> Memory:
    """Return the caller's elements as memory for messages."""
    return Memory(elements.address, elements.nbytes, HOST, elements.owner)


def _elements(memory: Memory, like: Buffer) -> Buffer:
    return Buffer(memory.address, like.dtype, (like.count,), device=memory.device.name, owner=memory)
