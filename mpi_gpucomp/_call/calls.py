"""Calls of collectives: mpi4py's arguments, parsed once into a `Call`.

One parser per method of mpi4py, as its `msgbuffer.pxi` has one `for_*` function per collective. A call whose arguments
are valid but beyond our kernels (derived datatypes, other operations) is parsed too; its `unsupported` says why it is
passed through to the MPI library.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, TypedDict

from mpi4py import MPI

from mpi_gpucomp._call.buffers import UnsupportedError, read_blocks, read_vector
from mpi_gpucomp.device.producer import stream_handle
from mpi_gpucomp.engine.program import Blocks
from mpi_gpucomp.errors import BufferSpecError, SpecError
from mpi_gpucomp.schedule.ir import COLLECTIVES

if TYPE_CHECKING:
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.schedule.ir import Algorithm

__all__ = ["MAX_CHUNK", "PARSERS", "Call", "CallOptions", "check_options", "find_method", "parse_call"]

MAX_CHUNK = 1 << 30
"""Bytes of a chunk: wires take messages of less than 2 GiB, and a frame may be longer than its elements."""
OPERATIONS = ((MPI.SUM, "sum"), (MPI.PROD, "prod"), (MPI.MIN, "min"), (MPI.MAX, "max"))


class CallOptions(TypedDict, total=False):
    """Keyword options of a collective, beyond mpi4py's arguments; all ranks pass the same."""

    codec: str | Codec | None
    """The codec of this call."""
    role: str | None
    """The kind of data, for which the communicator has a codec."""
    algorithm: str | Algorithm | None
    """A name listed by `gpucomp algorithms`, the path of an MSCCL XML file, or a schedule."""
    chunk: int | None
    """Chunk size in bytes."""
    name: str | None
    """Named collectives may be started in a different order on each rank."""
    priority: int
    """Collectives of higher priority are served first on this rank."""
    replicate: bool
    """Broadcast only: overwrite the root's buffer with the decoded values, so all ranks hold identical data."""
    callback: Callable[[], None] | None
    """Called when the collective has completed, by the thread that notices."""
    on_error: Callable[[BaseException], None] | None
    """Called instead of `callback` with the error of a collective that has failed; not of passed-through calls."""
    stream: object
    """The CUDA stream that produces and consumes this rank's buffers; None for the current one."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a collective on this rank: what was asked for."""

    method: str
    """mpi4py's name, of the blocking form."""
    args: tuple[Any, ...]
    """As they were passed."""
    options: CallOptions
    blocking: bool
    collective: str = ""
    """The name in `schedule.ir.COLLECTIVES`; "scan" for Scan and Exscan, which have no schedule."""
    sent: Blocks | None = None
    received: Blocks | None = None
    op: str = "replace"
    root: int = 0
    in_place: bool = False
    counts: tuple[int, ...] | None = None
    """The elements of each block; None if each rank knows only its own."""
    deferred_output: bool = False
    """The output overwrites the start of the input, once that is no longer read (a reduce-scatter in place)."""
    unsupported: str | None = None
    """Why only the MPI library can run the call, if so."""
    part_of: str = ""
    """The method of the user that this call is a part of, if it is not the user's own."""

    @property
    def blocks(self) -> Blocks:
        """Return the blocks that this rank sends or, if it sends none, receives."""
        blocks = self.sent or self.received
        assert blocks is not None
        return blocks

    @property
    def nbytes(self) -> int:
        """Return the size of all blocks in bytes, as far as every rank knows it."""
        return sum(self.counts) * self.blocks.buffer.dtype.itemsize if self.counts else 0

    @property
    def plan_key(self) -> Hashable | None:
        """Return what a plan depends on, the state of the tuner aside; None if that cannot be compared fast."""
        asked: tuple[object, ...] = ()
        if self.options:
            asked = tuple(self.options.get(option) for option in ("codec", "role", "algorithm", "chunk"))
            if not all(option is None or isinstance(option, (str, int)) for option in asked):
                return None
            asked = *asked, self.options.get("name") is None
        if self.unsupported is not None:
            return None
        dtype = self.blocks.buffer.dtype.name
        return self.method, self.blocking, self.counts, dtype, self.op, self.root, self.in_place, self.part_of, asked

    @property
    def title(self) -> str:
        """Return mpi4py's name of the method that was called."""
        return self.method if self.blocking else f"I{self.method.lower()}"

    @property
    def signature(self) -> str:
        """Describe what all ranks must agree on."""
        if self.unsupported is not None:
            return f"{self.title} of elements or an operation that only the MPI library supports"
        if self.counts is None:
            what = "local counts"
        elif len(set(self.counts)) <= 1:
            what = str(self.counts[0] if self.counts else 0)
        else:
            what = f"counts {zlib.crc32(repr(self.counts).encode()):08x} (sum {sum(self.counts)})"
        known = COLLECTIVES.get(self.collective)
        root = f", root {self.root}" if known and known.rooted else ""
        op = f", {self.op}" if self.op != "replace" else ""
        part = f" for {self.part_of}" if self.part_of else ""
        return f"{self.title}{part} of {what} x {self.blocks.buffer.dtype}{root}{op}"


def parse_call(
    method: str, args: tuple[Any, ...], options: CallOptions, rank: int, size: int, *, blocking: bool = True
) -> Call:
    """Parse the arguments of a collective, on this rank of `size`."""
    if options:
        check_options(method, options, rank)
    reader = _Reader(method, args, options, blocking, rank, size)
    try:
        return PARSERS[method](reader, *args)
    except UnsupportedError as reason:
        return Call(method, args, options, blocking, unsupported=str(reason))


_OPTION_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "role": ("a string", lambda value: isinstance(value, str)),
    "chunk": (
        f"a number of bytes from 1 to {MAX_CHUNK}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_CHUNK,
    ),
    "name": ("a string", lambda value: isinstance(value, str)),
    "priority": ("an integer", lambda value: isinstance(value, int)),
    "replicate": ("a bool", lambda value: isinstance(value, bool)),
    "callback": ("a callable", callable),
    "on_error": ("a callable", callable),
    "stream": (
        "a CUDA stream: its handle, or an object with ptr, cuda_stream or __cuda_stream__",
        lambda value: stream_handle(value) is not None,
    ),
}
"""What options must be, unless None; `codec` and `algorithm` are checked where they are looked up."""


def check_options(method: str, options: CallOptions, rank: int) -> None:
    """Raise if an option does not exist, or its value is of the wrong type."""
    known = CallOptions.__annotations__
    for name, value in options.items():
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise SpecError(
                method,
                expected=f"options among {', '.join(known)}",
                got=f"{name}=",
                remedy=f"Did you mean {near[0]}?" if near else "Leave it out.",
                rank=rank,
            )
        expected, accepts = _OPTION_VALUES.get(name, ("", None))
        if value is not None and accepts is not None and not accepts(value):
            raise SpecError(
                method,
                expected=f"{name}= as {expected}",
                got=repr(value),
                remedy="Change it or leave it out.",
                rank=rank,
            )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the arguments of one call, and makes the `Call` of them."""

    method: str
    args: tuple[Any, ...]
    options: CallOptions
    blocking: bool
    rank: int
    size: int

    def blocks(self, spec: Any, blocks: int = 1, *, writable: bool) -> Blocks:
        """Read a buffer argument of equal blocks."""
        topic = self._topic(writable)
        # Alignment differs between ranks, and must not send them different ways: such buffers are packed later.
        return read_blocks(
            spec,
            blocks=blocks,
            writable=writable,
            topic=topic,
            rank=self.rank,
            allow_unaligned=True,
            stream=self._stream(),
        )

    def vector(self, spec: Any, *, writable: bool) -> Blocks:
        """Read a buffer argument with counts and displacements."""
        topic = self._topic(writable)
        return read_vector(
            spec,
            self.size,
            writable=writable,
            topic=topic,
            rank=self.rank,
            allow_unaligned=True,
            stream=self._stream(),
        )

    def _stream(self) -> int | None:
        """Return the handle of the stream that the call names, if any."""
        return stream_handle(self.options.get("stream"))

    def op(self, op: Any) -> str:
        """Read a reduction operation."""
        if not isinstance(op, MPI.Op):
            raise SpecError(
                self.method,
                expected="an MPI operation",
                got=repr(op),
                remedy="Pass for example MPI.SUM.",
                rank=self.rank,
            )
        for known, name in OPERATIONS:
            if op == known:
                return name
        predefined = (name for name, known in vars(MPI).items() if isinstance(known, MPI.Op) and known == op)
        raise UnsupportedError(
            f"the operation MPI.{next(predefined, '')}" if op.is_predefined else "a user's operation"
        )

    def root(self, root: Any) -> int:
        """Read the rank of the root."""
        try:
            number = index(root)
        except TypeError:
            number = -1
        if not 0 <= number < self.size:
            raise SpecError(
                self.method,
                expected=f"a root from 0 to {self.size - 1}",
                got=repr(root),
                remedy="Pass the rank of the root in this communicator, the same on every rank.",
                rank=self.rank,
            )
        return number

    def call(self, collective: str, sent: Blocks | None, received: Blocks | None, **facts: Any) -> Call:
        """Make the call."""
        return Call(self.method, self.args, self.options, self.blocking, collective, sent, received, **facts)

    def _topic(self, writable: bool) -> str:
        return f"{self.method}, {'receive' if writable else 'send'} buffer"

    def error(self, expected: str, got: str, remedy: str) -> BufferSpecError:
        """Make an error about the buffers."""
        return BufferSpecError(self.method, expected=expected, got=got, remedy=remedy, rank=self.rank)

    def in_place_elsewhere(self) -> BufferSpecError:
        """Make the error of MPI.IN_PLACE on a rank that is not the root."""
        return self.error(
            "a buffer", "MPI.IN_PLACE on a rank that is not the root", "Pass MPI.IN_PLACE at the root only."
        )

    def check_own_block(self, sent: Blocks | None, received: Blocks | None, block: int = 0) -> None:
        """Raise unless the block that this rank sends to itself has one type and length on both sides."""
        if sent is None or received is None:
            return
        ours, theirs = (sent.counts[block], sent.buffer.dtype), (received.counts[block], received.buffer.dtype)
        if ours != theirs:
            raise self.error(
                f"to receive {ours[0]} elements of {ours[1]}, as sent",
                f"a receive buffer of {theirs[0]} of {theirs[1]}",
                "Pass buffers of one type, and of the lengths that mpi4py requires.",
            )

    def check_no_alias(self, sent: Blocks, received: Blocks | None) -> None:
        """Raise if a reduction would overwrite its own input."""
        if received is None or received is sent or not received.buffer.count:
            return
        first = [one.buffer.address + one.starts[0] * one.buffer.dtype.itemsize for one in (sent, received)]
        if first[0] == first[1]:
            raise self.error(
                "send and receive buffers in different memory", "the same memory", "Pass MPI.IN_PLACE to send from it."
            )


def _one_block(blocks: Blocks, rank: int) -> Blocks:
    """Return one rank's block of a buffer."""
    return Blocks(blocks.buffer, [blocks.starts[rank]], [blocks.counts[rank]])


def _leading(blocks: Blocks, count: int) -> Blocks:
    """Return the first elements of a buffer."""
    return Blocks(blocks.buffer, [blocks.starts[0]], [count])


def _bcast(reader: _Reader, buf: Any, root: int = 0) -> Call:
    root = reader.root(root)
    blocks = reader.blocks(buf, writable=reader.rank != root)
    return reader.call("broadcast", blocks, blocks, root=root, in_place=True, counts=tuple(blocks.counts))


def _allreduce(
    reader: _Reader, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, *, collective: str = "allreduce"
) -> Call:
    received = reader.blocks(recvbuf, writable=True)
    in_place = sendbuf is MPI.IN_PLACE
    sent = received if in_place else reader.blocks(sendbuf, writable=False)
    operation = reader.op(op)
    reader.check_own_block(sent, received)
    reader.check_no_alias(sent, received)
    return reader.call(collective, sent, received, op=operation, in_place=in_place, counts=tuple(received.counts))


def _reduce(reader: _Reader, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0) -> Call:
    root = reader.root(root)
    received = reader.blocks(recvbuf, writable=True) if reader.rank == root else None
    in_place = sendbuf is MPI.IN_PLACE
    if in_place and received is None:
        raise reader.in_place_elsewhere()
    sent = received if in_place else reader.blocks(sendbuf, writable=False)
    assert sent is not None
    operation = reader.op(op)
    reader.check_own_block(sent, received)
    reader.check_no_alias(sent, received)
    counts = tuple(sent.counts)
    return reader.call("reduce", sent, received, op=operation, root=root, in_place=in_place, counts=counts)


def _allgather(reader: _Reader, sendbuf: Any, recvbuf: Any) -> Call:
    return _gather_to_all(reader, sendbuf, reader.blocks(recvbuf, reader.size, writable=True))


def _allgatherv(reader: _Reader, sendbuf: Any, recvbuf: Any) -> Call:
    return _gather_to_all(reader, sendbuf, reader.vector(recvbuf, writable=True))


def _gather_to_all(reader: _Reader, sendbuf: Any, received: Blocks) -> Call:
    in_place = sendbuf is MPI.IN_PLACE
    own = _one_block(received, reader.rank)
    sent = own if in_place else reader.blocks(sendbuf, writable=False)
    reader.check_own_block(sent, own)
    return reader.call("allgather", sent, received, in_place=in_place, counts=tuple(received.counts))


def _gather(reader: _Reader, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
    root = reader.root(root)
    received = reader.blocks(recvbuf, reader.size, writable=True) if reader.rank == root else None
    return _gather_to_root(reader, sendbuf, received, root, equal=True)


def _gatherv(reader: _Reader, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
    root = reader.root(root)
    received = reader.vector(recvbuf, writable=True) if reader.rank == root else None
    return _gather_to_root(reader, sendbuf, received, root, equal=False)


def _gather_to_root(reader: _Reader, sendbuf: Any, received: Blocks | None, root: int, *, equal: bool) -> Call:
    own = _one_block(received, reader.rank) if received else None
    in_place = sendbuf is MPI.IN_PLACE
    if in_place and own is None:
        raise reader.in_place_elsewhere()
    sent = own if in_place else reader.blocks(sendbuf, writable=False)
    assert sent is not None
    reader.check_own_block(sent, own)
    counts = tuple(sent.counts[:1]) * reader.size if equal else None
    return reader.call("gather", sent, received, root=root, in_place=in_place, counts=counts)


def _scatter(reader: _Reader, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
    root = reader.root(root)
    sent = reader.blocks(sendbuf, reader.size, writable=False) if reader.rank == root else None
    return _scatter_from_root(reader, sent, recvbuf, root, equal=True)


def _scatterv(reader: _Reader, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
    root = reader.root(root)
    sent = reader.vector(sendbuf, writable=False) if reader.rank == root else None
    return _scatter_from_root(reader, sent, recvbuf, root, equal=False)


def _scatter_from_root(reader: _Reader, sent: Blocks | None, recvbuf: Any, root: int, *, equal: bool) -> Call:
    own = _one_block(sent, reader.rank) if sent else None
    in_place = recvbuf is MPI.IN_PLACE
    if in_place and own is None:
        raise reader.in_place_elsewhere()
    received = own if in_place else reader.blocks(recvbuf, writable=True)
    assert received is not None
    reader.check_own_block(own, received)
    counts = tuple(received.counts[:1]) * reader.size if equal else None
    return reader.call("scatter", sent, received, root=root, in_place=in_place, counts=counts)


def _reduce_scatter_block(reader: _Reader, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Call:
    if sendbuf is MPI.IN_PLACE:
        whole = reader.blocks(recvbuf, reader.size, writable=True)
        return _reduce_to_shares(reader, whole, _leading(whole, whole.counts[0]), op, in_place=True)
    sent = reader.blocks(sendbuf, reader.size, writable=False)
    return _reduce_to_shares(reader, sent, reader.blocks(recvbuf, writable=True), op, in_place=False)


def _reduce_scatter(reader: _Reader, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = MPI.SUM) -> Call:
    in_place = sendbuf is MPI.IN_PLACE
    whole = reader.blocks(recvbuf if in_place else sendbuf, writable=in_place)
    received = whole if in_place else reader.blocks(recvbuf, writable=True)
    counts = _share_counts(reader, whole, received, recvcounts, in_place)
    starts = [whole.starts[0] + sum(counts[:rank]) for rank in range(reader.size)]
    sent = Blocks(whole.buffer, starts, counts)
    own = _leading(received, counts[reader.rank]) if in_place else received
    return _reduce_to_shares(reader, sent, own, op, in_place=in_place)


def _share_counts(reader: _Reader, whole: Blocks, received: Blocks, recvcounts: Any, in_place: bool) -> list[int]:
    """Return the elements that each rank receives of a reduce-scatter: as given, or equal shares."""
    total = whole.counts[0]
    if recvcounts is None:
        share, rest = divmod(total, reader.size)
        counts = [share] * reader.size if not rest else []
    else:
        counts = [int(count) for count in recvcounts]
    fits = len(counts) == reader.size and min(counts, default=0) >= 0 and sum(counts) == total
    if not fits or (not in_place and received.counts[0] != counts[reader.rank]):
        raise reader.error(
            f"counts for {reader.size} ranks that add up to the {total} elements sent, and this rank's in the "
            "receive buffer",
            f"{'no counts' if recvcounts is None else list(counts)}, and {received.counts[0]} elements to receive",
            "Pass recvcounts, one for each rank, the same on every rank.",
        )
    return counts


def _reduce_to_shares(reader: _Reader, sent: Blocks, received: Blocks, op: Any, *, in_place: bool) -> Call:
    operation = reader.op(op)
    reader.check_own_block(_one_block(sent, reader.rank), received)
    if not in_place:
        reader.check_no_alias(sent, received)
    # MPI returns the result at the start of the buffer, which still holds other blocks of the input: hence deferred.
    return reader.call(
        "reduce_scatter", sent, received, op=operation, counts=tuple(sent.counts), deferred_output=in_place
    )


def _alltoall(reader: _Reader, sendbuf: Any, recvbuf: Any) -> Call:
    return _exchange(reader, sendbuf, recvbuf, partial(reader.blocks, blocks=reader.size), equal=True)


def _alltoallv(reader: _Reader, sendbuf: Any, recvbuf: Any) -> Call:
    return _exchange(reader, sendbuf, recvbuf, reader.vector, equal=False)


def _exchange(reader: _Reader, sendbuf: Any, recvbuf: Any, read: Callable[..., Blocks], *, equal: bool) -> Call:
    received = read(recvbuf, writable=True)
    in_place = sendbuf is MPI.IN_PLACE
    sent = received if in_place else read(sendbuf, writable=False)
    reader.check_own_block(sent, received, reader.rank)
    return reader.call("alltoall", sent, received, in_place=in_place, counts=tuple(sent.counts) if equal else None)


PARSERS: dict[str, Callable[..., Call]] = {
    "Bcast": _bcast,
    "Reduce": _reduce,
    "Allreduce": _allreduce,
    "Allgather": _allgather,
    "Allgatherv": _allgatherv,
    "Gather": _gather,
    "Gatherv": _gatherv,
    "Scatter": _scatter,
    "Scatterv": _scatterv,
    "Reduce_scatter": _reduce_scatter,
    "Reduce_scatter_block": _reduce_scatter_block,
    "Alltoall": _alltoall,
    "Alltoallv": _alltoallv,
    "Scan": partial(_allreduce, collective="scan"),
    "Exscan": partial(_allreduce, collective="scan"),
}
"""By mpi4py's name of the blocking method."""


def find_method(topic: str, name: str, rank: int) -> str:
    """Return the blocking method that a name means: Bcast, bcast or Ibcast."""
    methods = {known.lower(): known for known in PARSERS}
    method = methods.get(name.lower()) or methods.get(name.lower().removeprefix("i"))
    if method is None:
        near = get_close_matches(name.lower(), methods, 1)
        raise SpecError(
            topic,
            expected=f"one of {', '.join(PARSERS)}",
            got=repr(name),
            remedy=f"Did you mean {methods[near[0]]}?" if near else "Name a collective as mpi4py does.",
            rank=rank,
        )
    return method
