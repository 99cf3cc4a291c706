"""One running collective: what the core executes, and what Python does for it.

The core runs the lanes, and codecs of this project's kernels on the host and on GPUs. Other codecs are called here for
each chunk: the core asks by an event, and gets the result when the work has completed.
"""

from __future__ import annotations

import ctypes
from collections import Counter, deque
from contextlib import suppress
from ctypes import byref, c_int32, c_int64
from typing import TYPE_CHECKING, TypedDict

from mpi_gpucomp.codec import OPS
from mpi_gpucomp.codec.raw import REDUCE_TILE
from mpi_gpucomp.core.library import (
    BUSY,
    DONE,
    FAILED,
    FailureInfo,
    GiveBack,
    InFlightInfo,
    Open,
    OpInfo,
    Take,
    TaskSettings,
    core,
)
from mpi_gpucomp.device import Buffer, Memory
from mpi_gpucomp.device.cuda import CudaDevice
from mpi_gpucomp.engine.coder import HOST, INLINE_BYTES, Coder
from mpi_gpucomp.engine.gpu import core_gpu
from mpi_gpucomp.engine.native_codec import native_codec
from mpi_gpucomp.engine.program import compile_program
from mpi_gpucomp.errors import DeviceError, FrameError
from mpi_gpucomp.trace import NO_CALL_TRACE, CallTrace, InFlight

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from typing import Any

    from typing_extensions import Unpack

    from mpi_gpucomp.codec.frame import FrameHeader
    from mpi_gpucomp.core.wire import Wire
    from mpi_gpucomp.device import DType, Stream
    from mpi_gpucomp.device.cuda import CudaStream
    from mpi_gpucomp.engine.program import Blocks, Layout
    from mpi_gpucomp.schedule.ir import Algorithm

    Ready = Callable[[], bool]
    Coding = Generator[Ready, None, int]
    StreamWork = Callable[[Stream], None]

__all__ = ["CollectiveTask", "TaskOptions"]

ENCODE, DECODE, COPY, REDUCE = 1, 2, 3, 4
PYTHON_FAILED, GPU_FAILED, GPU_WITHOUT_MEMORY = 5, 6, 7
BAD_LENGTH, BAD_SCRATCH, BAD_TRANSFER, NO_MEMORY = 100, 101, 102, 103
MAX_IN_FLIGHT = 1024
OP_NAMES = {number: name for name, number in OPS.items()}


class TaskOptions(TypedDict, total=False):
    """Options of a task."""

    op: str
    same_everywhere: bool
    """Whether a rank that sends a final value replaces its own by the decoded one."""
    update_root: bool
    """Whether the root of a broadcast does so too, whose buffer a schedule leaves alone otherwise."""
    raw: bool
    """Whether elements are sent without frames and codec, in place where possible."""


class CollectiveTask:
    """A collective in progress."""

    def __init__(
        self,
        algorithm: Algorithm,
        layout: Layout,
        dtype: DType,
        coder: Coder,
        wire: Wire,
        tag: int,
        *,
        name: str,
        before: StreamWork | None = None,
        after: StreamWork | None = None,
        **options: Unpack[TaskOptions],
    ) -> None:
        """Execute this rank's program; `before` and `after` queue work on the stream, first and last."""
        self.name, self.tag = name, tag
        self.title = name
        """Its name in errors; the engine sets it to the title of the call."""
        self._program = compile_program(algorithm, wire.rank)
        self._layout, self._dtype, self._coder, self._wire = layout, dtype, coder, wire
        self._op, self._before, self._after = options.get("op", "sum"), before, after
        self._raw = options.get("raw", False)
        gpu = core_gpu(coder.device) if isinstance(coder.device, CudaDevice) else None
        self._codec = native_codec(coder.codec, dtype, gpu)
        self.is_external = not self._codec.is_native
        """Whether Python does all coding."""
        lossy = not coder.codec.lossless
        replicates = options.get("same_everywhere", False) or options.get("update_root", False)
        chosen = TaskSettings(
            chunk=layout.chunk,
            per_block=layout.per_block,
            slot_bytes=coder.room(layout.chunk, dtype),
            tag=tag,
            op=OPS[self._op],
            raw=self._raw,
            in_place=self._raw and coder.wire_reaches and not self.is_external,
            updates_own=replicates and lossy,
            update_root=options.get("update_root", False),
            external=self.is_external,
            alone=coder.inline or layout.chunk * dtype.itemsize < INLINE_BYTES,
        )
        if not self.is_external and not self._raw:
            self._codec.record(layout.lengths(), self._op)
        buffers = [*_blocks(layout.input), *_blocks(layout.output)]
        self.handle = core().gc_task_new(wire.handle, self._program.handle, self._codec.handle, byref(chosen), *buffers)
        self._keep: list[Any] = [layout.input, layout.output, buffers]
        self._streams: list[CudaStream] = []
        """Of copies to and from a GPU, beside the kernels."""
        if gpu is not None and not self.is_external:
            self._streams = [gpu.device.take_stream() for _ in range(2)]
            handles = [stream.handle.ptr for stream in (coder.stream, *self._streams)]  # type: ignore[attr-defined]
            core().gc_task_set_cuda(self.handle, gpu.handle, *handles)
        self._memory: dict[int, list[Memory]] = {}
        self._headers: dict[int, FrameHeader] = {}
        self._coding: deque[tuple[int, OpInfo, Coding, Ready]] = deque()
        """Ops in progress in Python."""
        self._error: Exception | None = None
        if self.is_external:
            self._keep.append(self._set_callbacks())
        self.done = False
        """Whether all lanes and all queued work have completed, and the caller may use the buffers."""
        self.call_trace: CallTrace = NO_CALL_TRACE
        self._sent: Counter[tuple[int, int]] = Counter()

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
        return bool(self._coding) or bool(self.handle and core().gc_task_state(self.handle) & BUSY)

    @property
    def needs_python(self) -> bool:
        """Return True if `progress` has work in progress."""
        return bool(self._coding)

    def set_peer_tag(self, peer: int, tag: int) -> None:
        """Set the first tag that a peer receives on; others use ours."""
        core().gc_task_set_peer_tag(self.handle, peer, tag)

    def prepare(self, longest: int) -> None:
        """Prepare the lanes, now that the length of the longest block of all ranks is known."""
        if self._before is not None:
            self._before(self._coder.stream)
            if not self.is_external and self._coder.works_in_place:  # the core does not wait for the host's streams
                self._coder.stream.record().wait()
        ring = self.call_trace.ring
        if ring is not None:
            core().gc_task_set_trace(self.handle, *ring)
        core().gc_task_prepare(self.handle, longest)

    @property
    def may_post_early(self) -> bool:
        """Return True if messages may arrive before it runs: in memory that nothing else has to fill first."""
        return self._before is None and not self.is_external and self._coder.device is HOST

    def post_early(self) -> None:
        """Post receives, all but the last ones; it is prepared and does not run yet."""
        core().gc_task_post_early(self.handle)

    def run(self) -> None:
        """Let the core progress it."""
        core().gc_task_run(self.handle)

    def keep_running(self) -> None:
        """Report it again when it has stalled for another while."""
        core().gc_task_continue(self.handle)

    def suspend(self) -> None:
        """Cancel unmatched receives and return their memory; other transfers continue."""
        core().gc_task_suspend(self.handle)

    def ended(self) -> None:
        """Handle the end of the core's work: raise its error, or start the last work of ours."""
        state = core().gc_task_state(self.handle)
        if state & FAILED:
            raise self._failure()
        if not state & DONE or self.done:
            return
        if self._after is not None:
            self._after(self._coder.stream)
        if self._after is None and not self.is_external:
            self.done = True
        else:
            self._coding.append((0, OpInfo(), self._finish(), _always))

    def _finish(self) -> Coding:
        """Wait until the stream has executed all queued work."""
        end = self._coder.stream.record()
        yield end.done
        end.wait()
        self.done = True
        return 0

    # Work in Python

    def code(self, op: int) -> None:
        """Start an op that the core has asked for."""
        info = OpInfo()
        core().gc_op_info(op, byref(info))
        self._coding.append((op, info, self._code(info), _always))

    def progress(self) -> bool:
        """Progress the work in Python without blocking; return True if anything progressed."""
        moved = False
        for _ in range(len(self._coding)):
            op, info, coding, ready = self._coding.popleft()
            try:
                while ready():
                    ready, moved = next(coding), True
            except StopIteration as end:
                moved = True
                if op:
                    core().gc_op_done(op, end.value, 0)
            except Exception as error:
                self._error = self._error or error
                if not op:
                    raise
                core().gc_op_done(op, 0, PYTHON_FAILED)
                moved = True
            else:
                self._coding.append((op, info, coding, ready))
        return moved

    def _code(self, info: OpInfo) -> Coding:
        """Carry out an op; return the bytes of what was encoded."""
        coder, stream = self._coder, self._coder.stream
        if info.kind == ENCODE:
            source, to = self._elements(info.source, info.count), self._frame(info)
            if info.framed:
                return (yield from coder.encode(source, to, info.loop, raw=bool(info.raw)))
            return (yield from coder.copy(source, to))
        if info.kind == DECODE:
            pending = self._decode(info)
            yield pending.done
            pending.result()
            return 0
        to, nbytes = info.target, info.count * self._dtype.itemsize
        if info.kind == COPY:
            stream.copy(to, info.source, nbytes)
        else:
            kernel, tiles = f"reduce_{self._dtype.suffix}", -(-info.count // REDUCE_TILE)
            stream.launch(kernel, tiles, to, info.source, info.count, info.op)
        queued = stream.record()
        yield queued.done
        queued.wait()
        return 0

    def _decode(self, info: OpInfo) -> Any:
        """Queue the decoding of a frame, or the storing of a raw message."""
        to, op = self._elements(info.target, info.count), OP_NAMES[info.op]
        received = self._frame(info).part(0, info.frame_bytes)
        if not info.framed:
            return self._coder.place(received, to, op)
        where = self._where(info.lane, info.chunk, info.loop)
        header = self._headers.pop(info.frame, None) or self._coder.header(received, where)
        return self._coder.decode(header, received, to, op, info.loop, where)

    def _elements(self, address: int, count: int) -> Buffer:
        return Buffer(address, self._dtype, (count,), device=self._coder.stream.device.name)

    def _frame(self, info: OpInfo) -> Memory:
        known = self._memory.get(info.frame)
        if known:
            return known[-1]
        return Memory(info.frame, info.capacity, HOST, None)

    def _set_callbacks(self) -> Any:
        """Give the core memory that the device and the wire can access."""
        device = self._coder.stream.device

        def take(allocate: Callable[[int], Memory], nbytes: int) -> int:
            try:
                memory = allocate(nbytes)
            except Exception as error:
                self._error = self._error or error
                return 0
            self._memory.setdefault(memory.address, []).append(memory)
            return memory.address

        def give_back(address: int, nbytes: int) -> None:
            self._headers.pop(address, None)
            self._memory[address].pop().release()
            if not self._memory[address]:
                del self._memory[address]

        def open_frame(address: int, nbytes: int, lane: int, chunk: int, loop: int) -> int:
            try:
                where = self._where(lane, chunk, loop)
                header = self._coder.open(Memory(address, nbytes, device, None), where)
                _check_sequence(header, loop, where)
            except Exception as error:
                self._error = self._error or error
                return -1
            self._headers[address] = header
            return header.decoded_bytes

        callbacks = (
            Take(lambda nbytes: take(self._coder.memory, nbytes)),
            GiveBack(give_back),
            Take(lambda nbytes: take(device.alloc, nbytes)),
            GiveBack(give_back),
            Open(open_frame),
        )
        core().gc_task_set_python(self.handle, *callbacks)
        return callbacks

    # Failure

    def halt(self) -> None:
        """Stop for good, as it is: the communicator has failed."""
        core().gc_task_halt(self.handle)

    def abandon(self) -> None:
        """Stop after a failure: receive, encode and send nothing more."""
        core().gc_task_abandon(self.handle)

    def quiesce(self) -> None:
        """Wait for the queued work: afterwards nothing accesses the caller's buffers."""
        core().gc_task_quiesce(self.handle)
        with suppress(Exception):  # the error is already known
            self._coder.stream.record().wait()

    @property
    def sent(self) -> Counter[tuple[int, int]]:
        """Return the messages sent so far, by peer and channel."""
        if not self.handle:
            return self._sent
        lanes = self._program.lanes
        counts = (c_int64 * len(lanes))()
        known = core().gc_task_sent(self.handle, counts, len(lanes))
        sent: Counter[tuple[int, int]] = Counter()
        for lane, count in zip(lanes[:known], counts, strict=False):
            if lane.send is not None and count:
                sent[lane.send, lane.channel] += count
        return sent

    def drain(self, owed: Mapping[tuple[int, int], int]) -> bool:
        """Complete what is in flight, and drop what peers have sent (`owed`, by peer and channel).

        Return True if nothing is left. Only then is memory returned: the wire or the stream may use it until then.
        """
        with suppress(Exception):  # the error is already known
            self.progress()
        keys = list(owed)
        peers = (c_int32 * len(keys))(*(peer for peer, _ in keys))
        channels = (c_int64 * len(keys))(*(channel for _, channel in keys))
        counts = (c_int64 * len(keys))(*owed.values())
        if not core().gc_task_drain(self.handle, len(keys), peers, channels, counts) or self._coding:
            return False
        with suppress(Exception):
            self._coder.stream.record().wait()  # clears an error that would otherwise surface in the next task
        self.free()
        return True

    def in_flight(self) -> list[InFlight]:
        """Return the transfers that have not completed."""
        if not self.handle:
            return []
        found = (InFlightInfo * MAX_IN_FLIGHT)()
        known = core().gc_task_in_flight(self.handle, found, MAX_IN_FLIGHT)
        return [InFlight(one.kind, one.peer, one.rail, one.posted, one.waited, one.nbytes) for one in found[:known]]

    def free(self) -> None:
        """Return all memory: nothing is in flight."""
        if self.handle:
            self._sent = self.sent
            core().gc_task_free(self.handle)
            self.handle = 0
            self._keep.clear()
            if isinstance(self._coder.device, CudaDevice):
                for stream in self._streams:
                    self._coder.device.give_back_stream(stream)
                self._coder.close()

    def _failure(self) -> Exception:
        """Return the error of the core's failure, with the text of the Python function that does the same check."""
        info = FailureInfo()
        core().gc_task_failure(self.handle, byref(info))
        where = self._where(info.lane, info.chunk, info.loop)
        same = "Pass the same count and type on every rank."
        if info.code == PYTHON_FAILED and self._error is not None:
            return self._error
        if info.code == BAD_LENGTH:
            expected = f"{info.count * self._dtype.itemsize} bytes of {self._dtype}"
            return FrameError(where, expected=expected, got=f"{info.frame_bytes}", remedy=same)
        if info.code == BAD_SCRATCH:
            expected = f"a chunk of at most {self._layout.chunk} elements"
            place = f"{self.title}, chunk {info.chunk} of loop {info.loop}"
            same = "Pass the same count and chunk on every rank."
            return FrameError(place, expected=expected, got=f"{info.count}", remedy=same, rank=self._wire.rank)
        if info.code == BAD_TRANSFER:
            return FrameError(where, expected="a message that fits", got=(info.text or b"").decode(), remedy=same)
        device = self._coder.device.name
        if info.code in (NO_MEMORY, GPU_WITHOUT_MEMORY):
            return self._error or DeviceError(
                where, expected=f"memory of {device}", got="none", remedy="Free memory, or set a smaller chunk."
            )
        if info.code == GPU_FAILED:
            return DeviceError(
                where,
                expected=f"work on {device} that completes",
                got=(info.text or b"").decode(),
                remedy="Run again with CUDA_LAUNCH_BLOCKING=1 (or compute-sanitizer) to find the kernel that failed.",
            )
        return self._bad_frame(info, where)

    def _bad_frame(self, info: FailureInfo, where: str) -> Exception:
        data = ctypes.create_string_buffer(ctypes.string_at(info.frame, info.frame_bytes), max(1, info.frame_bytes))
        framed = Memory(ctypes.addressof(data), info.frame_bytes, HOST, data)
        coder = Coder(self._coder.codec, HOST, inline=True)  # also of what a GPU has refused
        try:
            header = coder.open(framed, where)
            _check_sequence(header, info.loop, where)
            memory = HOST.alloc(max(1, header.decoded_bytes))
            ctypes.memset(memory.address, 0, memory.nbytes)
            to = Buffer(memory.address, self._dtype, (info.count,))
            coder.decode(header, framed, to, OP_NAMES[info.op], info.loop, where).result()
        except Exception as error:
            return error
        return FrameError(where, expected="a frame that can be decoded", got=f"code {info.code}", remedy="Report this.")

    def _where(self, lane: int, chunk: int, loop: int) -> str:
        peer = self._program.lanes[lane].receive if lane >= 0 else None
        source = "" if peer is None else f", from rank {peer}"
        return f"rank {self._wire.rank}: {self.title}, chunk {chunk} of loop {loop}{source}"


def _always() -> bool:
    return True


def _blocks(blocks: Blocks | None) -> tuple[Any, ...]:
    if blocks is None:
        return 0, 0, (c_int64 * 0)(), (c_int64 * 0)()
    number = len(blocks.counts)
    return blocks.buffer.address, number, (c_int64 * number)(*blocks.starts), (c_int64 * number)(*blocks.counts)


def _check_sequence(header: FrameHeader, loop: int, where: str) -> None:
    """Raise if a frame is out of sequence; before it is forwarded, so that no later rank has to detect it."""
    if header.sequence != loop:
        raise FrameError(
            where,
            expected=f"a frame of loop {loop}",
            got=f"one of loop {header.sequence}",
            remedy="A message was lost, repeated or reordered.",
        )
