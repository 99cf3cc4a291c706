"""A message from rank to rank that is under way, whichever side it is seen from.

The first part travels under the caller's tag, so that MPI itself matches messages and keeps their order. A short
message is there as a whole, in a raw frame. Otherwise the first part announces frames that follow under a tag of the
sender's choice, DEPTH of them at a time whatever the message's length: one is encoded while another is on the wire, and
decoded beside the wire. A sender that fails in between sends a note in a frame's place.

On rails a message without a codec travels in chunks with no frames around them (`raw`): out of the sender's own memory
and into the receiver's, where the wire reaches it, and by way of pinned memory where it does not.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from mpi_gpucomp.comm.packing import Packing, device_of
from mpi_gpucomp.device import order_after
from mpi_gpucomp.monitor.recorder import OFF, NoLog

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.comm.p2p.firsts import First
    from mpi_gpucomp.comm.p2p.line import Line
    from mpi_gpucomp.device import Buffer
    from mpi_gpucomp.engine.coder import Coder
    from mpi_gpucomp.engine.layout import Blocks

    Ready = Callable[[], bool]
    Moves = Generator[Ready, None, None]

__all__ = ["DEPTH", "NOTE", "RAW_BYTES", "RAW_DEPTH", "Message"]

DEPTH = 3
"""Frames of a message that a rank has memory for at a time."""
RAW_BYTES, RAW_DEPTH = 1 << 22, 8
"""Chunks without frames: how long, and how many are on their way at a time where they need no memory."""
NOTE = b"GPCE"
"""What a note begins with."""


class Message:
    """A message under way: an errand of the engine's, whose generator yields what it waits for."""

    def __init__(self, line: Line, blocks: Blocks, *, writable: bool) -> None:
        """Have memory for the first part; whoever sends it or listens for it says how to go on in `_moves`."""
        self.done = False
        self.error: Exception | None = None
        self._line, self._blocks, self._writable = line, blocks, writable
        self._device = device_of(blocks)
        self._packing = Packing(self._device)
        self._first = self._device.pinned(line.first_bytes)
        self._first_part: First | None = None
        self._coder: Coder | None = None
        self._log: NoLog = OFF
        self._inline = True
        self._fault: Exception | None = None
        """What went wrong, to be raised once nothing of the message is on its way any more."""
        self._ready: Ready = lambda: True
        self._moves: Moves

    def move(self) -> bool:
        """Go on as far as possible without waiting; say whether anything has moved."""
        moved = False
        try:
            while not self.done and self._step():
                moved = True
        except Exception:
            self._let_go(failed=True)
            raise
        return moved

    def _step(self) -> bool:
        """Go on to where the message waits next, if what it waits for is there."""
        try:
            try:
                if not self._ready():
                    return False
            except Exception as error:
                self._ready = self._moves.throw(error)
            else:
                self._ready = next(self._moves)
        except StopIteration:
            self._let_go(failed=False)
            self.done = True
        return True

    def _elements(self, codec: Codec, *, inline: bool) -> Buffer:
        """Take a coder, and return the caller's elements where it can work on them."""
        self._inline = inline
        self._coder = coder = self._line.coder(codec, self._device, inline)
        order_after(self._blocks.buffer, coder.stream)
        near = self._packing.via(self._blocks, writable=self._writable)
        assert near is not None
        self._packing.fill(coder.stream)
        return near.buffer.slice(near.starts[0], near.counts[0])

    def _has_come_to(self) -> Ready:
        """Return what says whether the coder is through with what was queued so far."""
        assert self._coder is not None
        return self._coder.stream.record().done

    @property
    def _depth(self) -> int:
        """Return how many raw chunks may be on their way."""
        assert self._coder is not None
        return RAW_DEPTH if self._coder.works_in_place else DEPTH

    def _let_go(self, *, failed: bool) -> None:
        """Give back what the message has used, unless MPI still has it."""
        self._log.end(failed=failed)
        if self._first_part is None or not self._first_part.holds:
            self._first.release()
        coder, self._coder = self._coder, None
        if coder is not None and failed:
            with suppress(Exception):  # one has been raised already
                coder.close()
        elif coder is not None:
            self._line.give_back(coder, self._inline)
