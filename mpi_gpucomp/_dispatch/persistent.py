"""Persistent broadcasts of one buffer with codec "delta": the root sends what has changed since the last one.

Every rank keeps a copy of the last version and its number. Before each broadcast the ranks compare the numbers; if any
of them has missed a version, the whole buffer is sent. Both steps are named collectives, so that the second can follow
the first in any order among the caller's other calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp._call.calls import parse_call
from mpi_gpucomp.codec.delta import Delta
from mpi_gpucomp.device import get_device
from mpi_gpucomp.device.host import HostDevice
from mpi_gpucomp.errors import BufferSpecError
from mpi_gpucomp.request import PersistentRequest, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp._call.calls import CallOptions
    from mpi_gpucomp._dispatch.dispatcher import Dispatcher
    from mpi_gpucomp.device import Buffer

__all__ = ["DeltaRequest"]


class DeltaRequest(PersistentRequest):
    """A persistent broadcast that remembers the last version."""

    def __init__(self, dispatcher: Dispatcher, buf: Any, root: int, options: CallOptions, name: str) -> None:
        """Prepare it on all ranks, under the same `name`; the first broadcast is full."""
        super().__init__(self._begin)
        self._dispatcher, self._name = dispatcher, options.get("name") or name
        buffer = _read_buffer(dispatcher, buf, root)
        device = get_device(buffer.device)
        self._buffer, self._base = buffer, device.alloc(buffer.nbytes)
        self._stream = device.stream(inline=True) if isinstance(device, HostDevice) else device.stream()
        self._codec = Delta(buffer, self._base)
        self._callback = options.get("callback")
        common: CallOptions = {**options, "name": self._name, "callback": self._on_done}
        whole = "split" if buffer.dtype.kind == "f" else "none"
        self._send_full = dispatcher.prepare("Bcast", (buf, root), {**common, "codec": whole})
        self._send_delta = dispatcher.prepare("Bcast", (buf, root), {**common, "codec": self._codec})
        self.version = 0
        """The version that this rank holds; 0 for none."""
        self.full = True
        """True if the last broadcast was full."""

    def forget(self) -> None:
        """Make the next broadcast a full one, as if this rank had missed a version."""
        self.version = 0

    def Free(self) -> None:
        """Release the buffers and the last version, once the active broadcast has completed."""
        self.Wait()
        if self._start is not None:
            self._dispatcher.runtime.forget_codec(self._codec)
            self._stream.close()
            self._base.release()
        super().Free()

    def _begin(self) -> Request:
        """Compare the versions of all ranks, then broadcast."""
        least_and_most = np.array([self.version, -self.version])
        options: CallOptions = {"name": f"{self._name}, version", "codec": "none"}
        # Whatever thread starts the broadcast, it follows what this one has queued.
        full, delta = self._send_full.behind_producers(), self._send_delta.behind_producers()
        chain = _ChainedRequest(lambda: self._broadcast(full, delta, *least_and_most.tolist()))
        options["callback"] = chain.start_second
        chain.first = self._dispatcher.start("Allreduce", (MPI.IN_PLACE, least_and_most, MPI.MIN), options)
        return chain

    def _broadcast(
        self, full: Callable[[], Request], delta: Callable[[], Request], least: int, negative_most: int
    ) -> Request:
        self.full = least != -negative_most or least == 0
        self._next = 1 - negative_most
        return full() if self.full else delta()

    def _on_done(self) -> None:
        """Keep the version, before the caller may overwrite the buffer."""
        self._stream.copy(self._base.address, self._buffer.address, self._buffer.nbytes)
        self._stream.synchronize()
        self.version = self._next
        if self._callback is not None:
            self._callback()


class _ChainedRequest(Request):
    """Two collectives; the second starts when the first has completed."""

    first: Request

    def __init__(self, start: Callable[[], Request]) -> None:
        self._start, self._second = start, None  # type: tuple[Callable[[], Request], Request | None]

    def start_second(self) -> None:
        """Start the second collective."""
        self._second = self._start()

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait until both have completed."""
        self.first.Wait()
        assert self._second is not None
        self._inactive = self._second.Wait(status)
        return self._inactive

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Return True if both have completed, or the first has failed."""
        if self._inactive:
            return True
        if not self.first.Get_status():
            return False
        return self._second is None or self._second.Get_status(status)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return True if both have completed."""
        self._inactive = self._inactive or (
            self.first.Test() and self._second is not None and self._second.Test(status)
        )
        return self._inactive


def _read_buffer(dispatcher: Dispatcher, buf: Any, root: int) -> Buffer:
    """Return the buffer of an argument of Bcast."""
    runtime = dispatcher.runtime
    call = parse_call("Bcast", (buf, root), {}, runtime.rank, runtime.size)
    if call.unsupported is not None or not call.blocks.buffer.contiguous:
        raise BufferSpecError(
            "Bcast_init with codec delta",
            expected="contiguous elements of a basic type",
            got=call.unsupported or "elements with gaps",
            remedy="Pass a contiguous copy, or another codec.",
            rank=runtime.rank,
        )
    return call.blocks.buffer
