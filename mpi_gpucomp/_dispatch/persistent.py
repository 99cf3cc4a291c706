"""Broadcasts of one buffer again and again, in which the root sends what has changed since the last time.

Every rank keeps a copy of the last version and its number. Before each broadcast the ranks compare the numbers: if one
of them has missed a version, all of it is sent. Both steps have names, so that the second can follow from the first
wherever the caller is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp._call.calls import FORMS, Place
from mpi_gpucomp.codec.delta import Delta
from mpi_gpucomp.device import get_device
from mpi_gpucomp.device.host import HostDevice
from mpi_gpucomp.errors import BufferSpecError
from mpi_gpucomp.request import PersistentRequest, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp._dispatch.dispatcher import Caller
    from mpi_gpucomp._dispatch.plan import CallOptions
    from mpi_gpucomp.device import Buffer

__all__ = ["DeltaRequest"]


class DeltaRequest(PersistentRequest):
    """A broadcast that can be started again and again, and remembers what it sent."""

    def __init__(self, caller: Caller, buf: Any, root: int, options: CallOptions, name: str) -> None:
        """Let all ranks make one, of the same `name`; the first broadcast is a full one."""
        super().__init__(self._begin)
        self._caller, self._name = caller, options.get("name") or name
        buffer = _read(caller, buf, root)
        device = get_device(buffer.device)
        self._buffer, self._base = buffer, device.alloc(buffer.nbytes)
        self._stream = device.stream(inline=True) if isinstance(device, HostDevice) else device.stream()
        self._codec = Delta(buffer, self._base)
        self._callback = options.get("callback")
        common: CallOptions = {**options, "name": self._name, "callback": self._arrived}
        whole = "split" if buffer.dtype.kind == "f" else "none"
        self._send_all = caller.prepare("Bcast", (buf, root), {**common, "codec": whole})
        self._send_changes = caller.prepare("Bcast", (buf, root), {**common, "codec": self._codec})
        self.version = 0
        """The number of the version that this rank has; 0 for none."""
        self.full = True
        """Whether the last broadcast was a full one."""

    def forget(self) -> None:
        """Let the next broadcast be a full one, as for a rank that has missed a version."""
        self.version = 0

    def Free(self) -> None:
        """Let go of the buffers, and of the last version, once what was started is complete."""
        self.Wait()
        if self._start is not None:
            self._caller.forget(self._codec)
            self._stream.close()
            self._base.release()
        super().Free()

    def _begin(self) -> Request:
        """Compare the versions of all ranks, then send."""
        least_and_most = np.array([self.version, -self.version])
        options: CallOptions = {"name": f"{self._name}, version", "codec": "none"}
        chain = _Chain(lambda: self._follow(*least_and_most.tolist()))
        options["callback"] = chain.go_on
        chain.first = self._caller.begin("Allreduce", (MPI.IN_PLACE, least_and_most, MPI.MIN), options)
        return chain

    def _follow(self, least: int, negative_most: int) -> Request:
        self.full = least != -negative_most or least == 0
        self._next = 1 - negative_most
        return self._send_all() if self.full else self._send_changes()

    def _arrived(self) -> None:
        """Keep the version, before the caller may change the buffer."""
        self._stream.copy(self._base.address, self._buffer.address, self._buffer.nbytes)
        self._stream.synchronize()
        self.version = self._next
        if self._callback is not None:
            self._callback()


class _Chain(Request):
    """Two collectives, of which the second is started when the first is complete."""

    first: Request

    def __init__(self, start: Callable[[], Request]) -> None:
        self._start, self._second = start, None  # type: tuple[Callable[[], Request], Request | None]

    def go_on(self) -> None:
        """Start the second one."""
        self._second = self._start()

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait until both are complete."""
        self.first.Wait()
        assert self._second is not None
        self._over = self._second.Wait(status)
        return self._over

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Say whether both are complete."""
        self._over = self._over or (self.first.Test() and self._second is not None and self._second.Test(status))
        return self._over


def _read(caller: Caller, buf: Any, root: int) -> Buffer:
    """Return the buffer that an argument of Bcast names."""
    form = FORMS["Bcast"](Place("Bcast_init", caller.rank, caller.size), buf, root)
    buffer = form.some.buffer if form else None
    if buffer is None or not buffer.contiguous:
        raise BufferSpecError(
            "Bcast_init with codec delta",
            expected="contiguous elements of a type that we have kernels for",
            got="elements with gaps" if buffer else "a derived datatype, or elements that only MPI knows",
            remedy="Pass a contiguous copy, or another codec.",
            rank=caller.rank,
        )
    return buffer
