"""What a call of each collective means: which elements leave, which arrive, and what mpi4py's special values stand for.

One function for each collective takes the arguments as mpi4py has them and returns a `Form`, or None where mpi4py must
do it: derived datatypes, operations that we do not know, elements that we have no kernels for.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpi_gpucomp._call import buffers as specs
from mpi_gpucomp.engine.layout import Blocks
from mpi_gpucomp.errors import BufferSpecError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FORMS", "Form", "Place"]

OPERATIONS = ((MPI.SUM, "sum"), (MPI.PROD, "prod"), (MPI.MIN, "min"), (MPI.MAX, "max"))


@dataclass(frozen=True)
class Form:
    """A collective with this rank's part of the data."""

    collective: str
    sent: Blocks | None
    received: Blocks | None
    op: str = "replace"
    root: int = 0
    in_place: bool = False
    counts: tuple[int, ...] | None = None
    """The elements of each block, where all ranks know them; None where each knows its own alone."""
    lands_at_start: bool = False
    """Whether the output goes, at the end, to where the input begins (a reduce-scatter in place)."""

    @property
    def some(self) -> Blocks:
        """Return what this rank sends or, if nothing, receives."""
        blocks = self.sent or self.received
        assert blocks is not None
        return blocks

    @property
    def nbytes(self) -> int:
        """Return the bytes of all blocks, as far as all ranks know them."""
        return sum(self.counts or ()) * self.some.buffer.dtype.itemsize

    @property
    def said(self) -> str:
        """Say what all ranks must agree on."""
        if self.counts is None:
            what = "counts of its own"
        elif len(set(self.counts)) <= 1:
            what = str(self.counts[0] if self.counts else 0)
        else:
            what = f"counts {zlib.crc32(repr(self.counts).encode()):08x} (sum {sum(self.counts)})"
        return f"{what} x {self.some.buffer.dtype}, root {self.root}, {self.op}"


@dataclass(frozen=True)
class Place:
    """Where a call is made: the method for errors, and this rank of so many."""

    method: str
    rank: int
    size: int

    def blocks(self, spec: Any, blocks: int = 1, *, writable: bool) -> Blocks | None:
        """Read an argument of equal blocks."""
        topic = self._topic(writable)
        # Where elements lie is one rank's matter, and must not lead it another way than the others.
        return specs.blocks(spec, blocks=blocks, writable=writable, topic=topic, rank=self.rank, anywhere=True)

    def vector(self, spec: Any, *, writable: bool) -> Blocks | None:
        """Read an argument with counts and displacements."""
        topic = self._topic(writable)
        return specs.vector(spec, self.size, writable=writable, topic=topic, rank=self.rank, anywhere=True)

    def _topic(self, writable: bool) -> str:
        return f"{self.method}, {'receive' if writable else 'send'} buffer"

    def refuse(self, expected: str, got: str, remedy: str) -> BufferSpecError:
        """Make an error about a buffer."""
        return BufferSpecError(self.method, expected=expected, got=got, remedy=remedy, rank=self.rank)


def _operation(op: Any) -> str | None:
    return next((name for known, name in OPERATIONS if op == known), None)


def _own(blocks: Blocks, rank: int) -> Blocks:
    """Return one rank's block of a buffer as all there is."""
    return Blocks(blocks.buffer, [blocks.starts[rank]], [blocks.counts[rank]])


def _matched(place: Place, sent: Blocks | None, received: Blocks | None, block: int = 0) -> None:
    """Raise unless what this rank sends is what it receives of itself: one type, one length."""
    if sent is None or received is None:
        return
    ours, theirs = (sent.counts[block], sent.buffer.dtype), (received.counts[block], received.buffer.dtype)
    if ours != theirs:
        raise place.refuse(
            f"{ours[0]} elements of {ours[1]} to be received, as they are sent",
            f"{theirs[0]} of {theirs[1]}",
            "Pass buffers of one type, and of the lengths that mpi4py asks for.",
        )


def _apart(place: Place, sent: Blocks, received: Blocks | None) -> None:
    """Raise where a reduction would overwrite what it still reads."""
    if received is None or received is sent or not received.buffer.count:
        return
    first = [one.buffer.address + one.starts[0] * one.buffer.dtype.itemsize for one in (sent, received)]
    if first[0] == first[1]:
        raise place.refuse(
            "other memory to receive into than what is sent from",
            "the same",
            "Pass MPI.IN_PLACE as what is sent.",
        )


def _bcast(place: Place, buf: Any, root: int = 0) -> Form | None:
    blocks = place.blocks(buf, writable=place.rank != root)
    return Form("broadcast", blocks, blocks, "replace", root, True, tuple(blocks.counts)) if blocks else None


def _all_reduce(place: Place, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Form | None:
    operation, received = _operation(op), place.blocks(recvbuf, writable=True)
    in_place = sendbuf is MPI.IN_PLACE
    sent = received if in_place else place.blocks(sendbuf, writable=False)
    if operation is None or received is None or sent is None:
        return None
    _matched(place, sent, received)
    _apart(place, sent, received)
    return Form("allreduce", sent, received, operation, 0, in_place, tuple(received.counts))


def _scan(place: Place, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Form | None:
    form = _all_reduce(place, sendbuf, recvbuf, op)
    return form and replace(form, collective="scan")


def _reduce(place: Place, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0) -> Form | None:
    operation = _operation(op)
    received = place.blocks(recvbuf, writable=True) if place.rank == root else None
    in_place = sendbuf is MPI.IN_PLACE
    if in_place and place.rank != root:
        raise _nothing_in_place(place)
    sent = received if in_place else place.blocks(sendbuf, writable=False)
    if operation is None or sent is None or (received is None and place.rank == root):
        return None
    _matched(place, sent, received)
    _apart(place, sent, received)
    return Form("reduce", sent, received, operation, root, in_place, tuple(sent.counts))


def _nothing_in_place(place: Place) -> BufferSpecError:
    return place.refuse("a buffer", "MPI.IN_PLACE where nothing is received", "Pass MPI.IN_PLACE at the root alone.")


def _all_gather(place: Place, sendbuf: Any, recvbuf: Any) -> Form | None:
    return _gathered(place, sendbuf, place.blocks(recvbuf, place.size, writable=True))


def _all_gather_v(place: Place, sendbuf: Any, recvbuf: Any) -> Form | None:
    return _gathered(place, sendbuf, place.vector(recvbuf, writable=True))


def _gathered(place: Place, sendbuf: Any, received: Blocks | None) -> Form | None:
    in_place = sendbuf is MPI.IN_PLACE
    sent = None if in_place else place.blocks(sendbuf, writable=False)
    if received is None or (sent is None and not in_place):
        return None
    own = _own(received, place.rank)
    _matched(place, sent, own)
    return Form("allgather", sent or own, received, "replace", 0, in_place, tuple(received.counts))


def _gather(place: Place, sendbuf: Any, recvbuf: Any, root: int = 0) -> Form | None:
    received = place.blocks(recvbuf, place.size, writable=True) if place.rank == root else None
    form = _gathered_at(place, sendbuf, received, root)
    return form and replace(form, counts=tuple(form.some.counts[:1]) * place.size)


def _gather_v(place: Place, sendbuf: Any, recvbuf: Any, root: int = 0) -> Form | None:
    return _gathered_at(place, sendbuf, place.vector(recvbuf, writable=True) if place.rank == root else None, root)


def _gathered_at(place: Place, sendbuf: Any, received: Blocks | None, root: int) -> Form | None:
    in_place = sendbuf is MPI.IN_PLACE
    if in_place and place.rank != root:
        raise _nothing_in_place(place)
    sent = None if in_place else place.blocks(sendbuf, writable=False)
    if (received is None and place.rank == root) or (sent is None and not in_place):
        return None
    own = _own(received, place.rank) if received else None
    _matched(place, sent, own)
    return Form("gather", sent or own, received, "replace", root, in_place)


def _scatter(place: Place, sendbuf: Any, recvbuf: Any, root: int = 0) -> Form | None:
    sent = place.blocks(sendbuf, place.size, writable=False) if place.rank == root else None
    form = _scattered(place, sent, recvbuf, root)
    return form and replace(form, counts=tuple(form.some.counts[:1]) * place.size)


def _scatter_v(place: Place, sendbuf: Any, recvbuf: Any, root: int = 0) -> Form | None:
    return _scattered(place, place.vector(sendbuf, writable=False) if place.rank == root else None, recvbuf, root)


def _scattered(place: Place, sent: Blocks | None, recvbuf: Any, root: int) -> Form | None:
    in_place = recvbuf is MPI.IN_PLACE
    if in_place and place.rank != root:
        raise _nothing_in_place(place)
    received = None if in_place else place.blocks(recvbuf, writable=True)
    if (sent is None and place.rank == root) or (received is None and not in_place):
        return None
    own = _own(sent, place.rank) if sent else None
    _matched(place, own, received)
    return Form("scatter", sent, received or own, "replace", root, in_place)


def _reduce_scatter_block(place: Place, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Form | None:
    if sendbuf is MPI.IN_PLACE:
        whole = place.blocks(recvbuf, place.size, writable=True)
        return _reduced_and_scattered(place, whole, whole and _start(whole, whole.counts[0]), op, in_place=True)
    sent = place.blocks(sendbuf, place.size, writable=False)
    return _reduced_and_scattered(place, sent, place.blocks(recvbuf, writable=True), op)


def _reduce_scatter(place: Place, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = MPI.SUM) -> Form | None:
    in_place = sendbuf is MPI.IN_PLACE
    whole = place.blocks(recvbuf if in_place else sendbuf, writable=in_place)
    received = whole if in_place else place.blocks(recvbuf, writable=True)
    if whole is None or received is None:
        return None
    counts = _shares(place, whole, received, recvcounts, in_place)
    starts = [whole.starts[0] + sum(counts[:rank]) for rank in range(place.size)]
    sent = Blocks(whole.buffer, starts, counts)
    own = _start(received, counts[place.rank]) if in_place else received
    return _reduced_and_scattered(place, sent, own, op, in_place=in_place)


def _shares(place: Place, whole: Blocks, received: Blocks, recvcounts: Any, in_place: bool) -> list[int]:
    """Return how many elements each rank gets: as given, or the same for all."""
    total = whole.counts[0]
    if recvcounts is None:
        share, rest = divmod(total, place.size)
        counts = [share] * place.size if not rest else []
    else:
        counts = [int(count) for count in recvcounts]
    fits = len(counts) == place.size and min(counts, default=0) >= 0 and sum(counts) == total
    if not fits or (not in_place and received.counts[0] != counts[place.rank]):
        raise place.refuse(
            f"counts for {place.size} ranks that add up to the {total} elements that are sent, and this rank's in the "
            "receive buffer",
            f"{'no counts' if recvcounts is None else list(counts)}, and {received.counts[0]} elements to receive",
            "Pass recvcounts, one for each rank, the same on every rank.",
        )
    return counts


def _start(blocks: Blocks, count: int) -> Blocks:
    """Return the first elements of a buffer."""
    return Blocks(blocks.buffer, [blocks.starts[0]], [count])


def _reduced_and_scattered(
    place: Place, sent: Blocks | None, received: Blocks | None, op: Any, *, in_place: bool = False
) -> Form | None:
    operation = _operation(op)
    if sent is None or received is None or operation is None:
        return None
    _matched(place, _own(sent, place.rank), received)
    if not in_place:
        _apart(place, sent, received)
    # MPI wants the result at the start of the buffer, where other blocks of the input are: it goes there at the end.
    return Form("reduce_scatter", sent, received, operation, 0, False, tuple(sent.counts), lands_at_start=in_place)


def _all_to_all(place: Place, sendbuf: Any, recvbuf: Any) -> Form | None:
    form = _exchanged(place, sendbuf, recvbuf, partial(place.blocks, blocks=place.size))
    return form and replace(form, counts=tuple(form.some.counts))


def _all_to_all_v(place: Place, sendbuf: Any, recvbuf: Any) -> Form | None:
    return _exchanged(place, sendbuf, recvbuf, place.vector)


def _exchanged(place: Place, sendbuf: Any, recvbuf: Any, read: Callable[..., Blocks | None]) -> Form | None:
    received = read(recvbuf, writable=True)
    in_place = sendbuf is MPI.IN_PLACE
    sent = received if in_place else read(sendbuf, writable=False)
    if sent is None or received is None:
        return None
    _matched(place, sent, received, place.rank)
    return Form("alltoall", sent, received, "replace", 0, in_place)


FORMS: dict[str, Callable[..., Form | None]] = {
    "Bcast": _bcast,
    "Reduce": _reduce,
    "Allreduce": _all_reduce,
    "Allgather": _all_gather,
    "Allgatherv": _all_gather_v,
    "Gather": _gather,
    "Gatherv": _gather_v,
    "Scatter": _scatter,
    "Scatterv": _scatter_v,
    "Reduce_scatter": _reduce_scatter,
    "Reduce_scatter_block": _reduce_scatter_block,
    "Alltoall": _all_to_all,
    "Alltoallv": _all_to_all_v,
    "Scan": _scan,
    "Exscan": _scan,
}
"""By the name of mpi4py's method."""
