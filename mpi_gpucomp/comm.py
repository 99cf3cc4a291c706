"""Collectives of an MPI communicator, compressed and pipelined, under mpi4py's names.

So far: Bcast, Reduce, Allreduce, Allgather, Reduce_scatter_block, Alltoall, Gather and Scatter on whole buffers of
equal counts, blocking and (with an I in front) not.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpi_gpucomp.agreement import agree
from mpi_gpucomp.codec import find
from mpi_gpucomp.collectives import algorithms, build
from mpi_gpucomp.device import as_buffer, get_device, order_after
from mpi_gpucomp.engine.coder import Coder
from mpi_gpucomp.engine.engine import Engine, Job
from mpi_gpucomp.engine.layout import Blocks, Layout
from mpi_gpucomp.engine.progress import Crank
from mpi_gpucomp.engine.task import CHANNELS, Task
from mpi_gpucomp.errors import BufferError, GpucompError, SpecError
from mpi_gpucomp.transport.mpi import MpiTransport

if TYPE_CHECKING:
    from types import TracebackType

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.schedule.ir import Algorithm

__all__ = ["Communicator", "Request"]

OPERATIONS = ((MPI.SUM, "sum"), (MPI.PROD, "prod"), (MPI.MIN, "min"), (MPI.MAX, "max"))
INLINE_BYTES = 1 << 16
"""Chunks below this size are coded by the thread that waits for them."""


class Request:
    """A collective that has been started."""

    def __init__(self, job: Job, crank: Crank, keep: tuple[object, ...]) -> None:
        """Keep what it works on alive."""
        self._job, self._crank, self._keep = job, crank, keep

    def Wait(self) -> None:
        """Wait until it is complete; raise what went wrong."""
        self._crank.wait(self._job)
        self._finish()

    def Test(self) -> bool:
        """Say whether it is complete; raise what went wrong."""
        if not self._job.finished:
            self._crank.turn()
        if self._job.finished:
            self._finish()
        return self._job.finished

    def _finish(self) -> None:
        self._keep = ()
        if self._job.error is not None:
            raise self._job.error


class Communicator:
    """The ranks of an MPI communicator, on a duplicate of it; a codec for all collectives, or one for a call."""

    def __init__(
        self, comm: MPI.Intracomm, codec: str | Codec = "none", *, chunk: int = 1 << 20, slots: int = 2
    ) -> None:
        """Let all ranks of `comm` make one, with the same codec, bytes of a chunk, and slots to run collectives in."""
        self._transport, self._control = MpiTransport(comm), comm.Dup()
        self.rank, self.size = comm.rank, comm.size
        self.codec, self.chunk = find(codec), chunk
        self._crank = Crank(Engine(slots), background=MPI.Query_thread() == MPI.THREAD_MULTIPLE)
        self._started = 0
        self._names: dict[int, tuple[str, Job | None]] = {}
        self._coders: dict[tuple[str, str, bool], Coder] = {}

    def __enter__(self) -> Communicator:
        """Use it for the length of a `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free it, unless something went wrong and peers may not come."""
        if error is None:
            self.Free()

    def Free(self) -> None:
        """End the background thread and free the duplicate: all ranks do, when nothing is under way."""
        self._crank.close()
        for coder in self._coders.values():
            coder.close()
        self._transport.close()
        self._control.Free()

    def Ibcast(self, buf: Any, root: int = 0, **options: Any) -> Request:
        """Start to send the root's buffer to all."""
        blocks = Blocks.even(as_buffer(buf, writable=self.rank != root), 1)
        return self._start("broadcast", blocks, blocks, "replace", root, **options)

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0, **options: Any) -> Request:
        """Start to reduce all buffers into the root's."""
        received = Blocks.even(as_buffer(recvbuf, writable=True), 1) if self.rank == root else None
        return self._start("reduce", *self._pair(sendbuf, received, 1), _operation(op), root, **options)

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Any) -> Request:
        """Start to reduce all buffers into everybody's."""
        received = Blocks.even(as_buffer(recvbuf, writable=True), 1)
        return self._start("allreduce", *self._pair(sendbuf, received, 1), _operation(op), **options)

    def Iallgather(self, sendbuf: Any, recvbuf: Any, **options: Any) -> Request:
        """Start to collect the buffers of all ranks everywhere."""
        received = Blocks.even(as_buffer(recvbuf, writable=True), self.size)
        return self._start("allgather", *self._pair(sendbuf, received, 1, own=self.rank), "replace", **options)

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Any) -> Request:
        """Start to reduce all buffers, each rank getting its share of the result."""
        sent = Blocks.even(as_buffer(sendbuf), self.size)
        received = Blocks.even(as_buffer(recvbuf, writable=True), 1)
        return self._start("reduce_scatter", sent, received, _operation(op), **options)

    def Ialltoall(self, sendbuf: Any, recvbuf: Any, **options: Any) -> Request:
        """Start to send every rank its share of every rank's buffer."""
        received = Blocks.even(as_buffer(recvbuf, writable=True), self.size)
        return self._start("alltoall", *self._pair(sendbuf, received, self.size), "replace", **options)

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Any) -> Request:
        """Start to collect the buffers of all ranks at the root."""
        received = Blocks.even(as_buffer(recvbuf, writable=True), self.size) if self.rank == root else None
        return self._start("gather", *self._pair(sendbuf, received, 1, own=self.rank), "replace", root, **options)

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Any) -> Request:
        """Start to send every rank its share of the root's buffer."""
        sent = Blocks.even(as_buffer(sendbuf), self.size) if self.rank == root else None
        received = Blocks.even(as_buffer(recvbuf, writable=True), 1)
        return self._start("scatter", sent, received, "replace", root, **options)

    def Bcast(self, buf: Any, root: int = 0, **options: Any) -> None:
        """Send the root's buffer to all."""
        self.Ibcast(buf, root, background=False, **options).Wait()

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0, **options: Any) -> None:
        """Reduce all buffers into the root's."""
        self.Ireduce(sendbuf, recvbuf, op, root, background=False, **options).Wait()

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Any) -> None:
        """Reduce all buffers into everybody's."""
        self.Iallreduce(sendbuf, recvbuf, op, background=False, **options).Wait()

    def Allgather(self, sendbuf: Any, recvbuf: Any, **options: Any) -> None:
        """Collect the buffers of all ranks everywhere."""
        self.Iallgather(sendbuf, recvbuf, background=False, **options).Wait()

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Any) -> None:
        """Reduce all buffers, each rank getting its share of the result."""
        self.Ireduce_scatter_block(sendbuf, recvbuf, op, background=False, **options).Wait()

    def Alltoall(self, sendbuf: Any, recvbuf: Any, **options: Any) -> None:
        """Send every rank its share of every rank's buffer."""
        self.Ialltoall(sendbuf, recvbuf, background=False, **options).Wait()

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Any) -> None:
        """Collect the buffers of all ranks at the root."""
        self.Igather(sendbuf, recvbuf, root, background=False, **options).Wait()

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Any) -> None:
        """Send every rank its share of the root's buffer."""
        self.Iscatter(sendbuf, recvbuf, root, background=False, **options).Wait()

    def _pair(
        self, sendbuf: Any, received: Blocks | None, blocks: int, own: int = 0
    ) -> tuple[Blocks | None, Blocks | None]:
        """Describe what is sent: of its own, or (in place) what the receive buffer holds for this rank."""
        if sendbuf is not MPI.IN_PLACE:
            return Blocks.even(as_buffer(sendbuf), blocks), received
        if received is None:
            raise BufferError(
                "send buffer",
                expected="a buffer",
                got="MPI.IN_PLACE where nothing is received",
                remedy="Pass MPI.IN_PLACE at the root alone.",
                rank=self.rank,
            )
        if blocks == len(received.counts):
            return received, received
        start, count = received.starts[own], received.counts[own]
        return Blocks(received.buffer, [start], [count]), received

    def _start(
        self,
        collective: str,
        sent: Blocks | None,
        received: Blocks | None,
        op: str,
        root: int = 0,
        *,
        codec: str | Codec | None = None,
        algorithm: str | None = None,
        chunk: int | None = None,
        name: str | None = None,
        priority: int = 0,
        background: bool = True,
    ) -> Request:
        """Start a collective; with a name, ranks may start it in any order among others with names."""
        some = sent or received
        assert some is not None
        buffer, piece = some.buffer, max(1, (chunk or self.chunk) // some.buffer.dtype.itemsize)
        try:
            chosen, plan = self._plan(collective, sent, received, root, codec, algorithm)
        except GpucompError as error:
            self._agree(collective, f"an error: {error}", asked=not background)
            raise
        what = f"{some.counts[0]} x {buffer.dtype}, root {root}, {op}"
        self._agree(collective, f"{what}, {chosen.spec}, {plan.name}, chunks of {piece}", asked=not background)
        longest = max(some.counts)
        layout = Layout(plan.goal, sent, received, min(piece, max(1, -(-longest // plan.chunks))))
        coder = self._coder(chosen, buffer.device, layout.piece * buffer.dtype.itemsize < INLINE_BYTES)
        for blocks in (sent, received):
            if blocks:
                order_after(blocks.buffer, coder.stream)
        tag = self._tag(name)
        task = Task(
            plan,
            layout,
            buffer.dtype,
            coder,
            self._transport,
            tag,
            name=name or collective,
            op=op,
            same_everywhere=collective in ("allreduce", "allgather"),
        )
        job = Job(task, priority)
        if name is not None:
            self._names[tag] = name, job
        self._crank.submit(job, background=background)
        return Request(job, self._crank, (sent, received))

    def _plan(
        self,
        collective: str,
        sent: Blocks | None,
        received: Blocks | None,
        root: int,
        codec: str | Codec | None,
        algorithm: str | None,
    ) -> tuple[Codec, Algorithm]:
        """Return the codec and the algorithm for a call that is right as far as this rank can see."""
        chosen = self.codec if codec is None else find(codec)
        self._check(collective, sent, received, chosen)
        in_place = sent is not None and received is not None and sent.buffer is received.buffer
        name = algorithm or algorithms(collective)[0].name
        return chosen, build(collective, name, self.size, root, in_place=in_place)

    def _agree(self, collective: str, said: str, *, asked: bool) -> None:
        """Compare with the other ranks what this one is about to do, where it may wait for them."""
        if asked and self.size > 1:
            agree(self._control, collective, said)

    def _coder(self, codec: Codec, device: str, inline: bool) -> Coder:
        """Return the coder that all collectives of this kind share, stream and all."""
        key = codec.spec, device, inline
        if key not in self._coders:
            self._coders[key] = Coder(codec, get_device(device), inline=inline)
        return self._coders[key]

    def _check(self, collective: str, sent: Blocks | None, received: Blocks | None, codec: Codec) -> None:
        """Raise unless the buffers go together."""
        for blocks in (sent, received):
            if blocks is None:
                continue
            codec.check_dtype(blocks.buffer.dtype)
            whole = sum(blocks.counts) == blocks.buffer.count or len(blocks.counts) == 1
            if not blocks.buffer.contiguous or not whole:
                raise BufferError(
                    collective,
                    expected=f"contiguous elements, as many for each of {len(blocks.counts)} ranks",
                    got=f"{blocks.buffer.count} {'contiguous' if blocks.buffer.contiguous else 'strided'} ones",
                    remedy="Pass a contiguous buffer whose length can be shared out evenly.",
                    rank=self.rank,
                )
        if sent and received and (sent.buffer.dtype, sent.counts[0]) != (received.buffer.dtype, received.counts[0]):
            raise BufferError(
                collective,
                expected=f"{sent.counts[0]} elements of {sent.buffer.dtype} to be received, as they are sent",
                got=f"{received.counts[0]} of {received.buffer.dtype}",
                remedy="Pass buffers of one type, and of the lengths that mpi4py asks for.",
                rank=self.rank,
            )

    def _tag(self, name: str | None) -> int:
        """Return the first of a collective's tags: by turn, or by name."""
        half = (self._transport.largest_tag + 1) // CHANNELS // 2
        if name is None:
            self._started += 1
            return self._started % half * CHANNELS
        tag = (half + zlib.crc32(name.encode()) % half) * CHANNELS
        before, job = self._names.get(tag, (name, None))
        if before != name or (job is not None and not job.finished):
            raise SpecError(
                f"collective {name!r}",
                expected="a name whose last run is complete, and that no other shares a tag with",
                got=f"{before!r} on the same tag" if before != name else "one that is still under way",
                remedy="Wait for the last run, or choose another name.",
                rank=self.rank,
            )
        return tag


def _operation(op: MPI.Op) -> str:
    found = next((name for known, name in OPERATIONS if op == known), None)
    if found is None:
        raise SpecError(
            "reduction",
            expected="MPI.SUM, MPI.PROD, MPI.MIN or MPI.MAX",
            got=op.name if hasattr(op, "name") else str(op),
            remedy="Use mpi4py's own collective for other operations.",
        )
    return found
