"""The processor as a device: a stream is a thread that works through its queue, and kernels release the GIL.

When queued work raises, what is queued behind it is skipped, and whoever waits behind it gets the exception; the rules
are in `lane.py`.
"""

from __future__ import annotations

from ctypes import c_int64, memmove, memset
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.device import library
from mpi_gpucomp.device.base import Device, Event, Memory, Stream
from mpi_gpucomp.device.lane import HostEvent, Lane, start_thread
from mpi_gpucomp.device.pool import ALIGNMENT, Pool
from mpi_gpucomp.device.workers import workers
from mpi_gpucomp.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Thread

__all__ = ["HostDevice", "HostEvent", "HostStream", "InlineStream"]


class InlineStream(Stream):
    """A stream that runs everything at once in the calling thread, and uses no other."""

    device: HostDevice

    def __init__(self, device: HostDevice) -> None:
        """Belong to `device`."""
        self.device = device
        self._lane = Lane()

    def _put(self, *item: Any) -> None:
        self._lane.put(item)

    def launch(self, kernel: str, tiles: int, *args: int | float, split: bool = True, grain: int = 64) -> None:
        """Run a kernel over all its tiles, in order."""
        self._put(self._lane.work, library.kernel(kernel), c_int64(0), c_int64(tiles), *library.arguments(args))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Queue a copy of bytes between two host addresses."""
        self._put(self._lane.work, memmove, to, source, nbytes)

    def fill(self, to: int, byte: int, nbytes: int) -> None:
        """Queue the setting of bytes to one value."""
        self._put(self._lane.work, memset, to, byte, nbytes)

    def run(self, work: Callable[[], None]) -> None:
        """Queue `work` itself."""
        self._put(self._lane.work, work)

    def release(self, memory: Memory) -> None:
        """Give memory back to its pool behind what is queued so far, also if that fails."""
        self._put(memory.release)

    def record(self) -> HostEvent:
        """Mark this place in the stream."""
        event = HostEvent()
        self._put(self._lane.mark, event)
        return event

    def wait(self, event: Event) -> None:
        """Hold later work until `event` is done."""
        if isinstance(event, HostEvent):
            self._put(self._lane.hold, event)
        else:
            self.run(event.wait)

    def synchronize(self) -> None:
        """Wait for everything queued so far; raise what went wrong."""
        self.record().wait()

    def close(self) -> None:
        """End the stream; raise what went wrong and nobody has asked for."""
        self.synchronize()


class HostStream(InlineStream):
    """A stream with a thread of its own, started by the first work; large kernels are shared with other cores."""

    def __init__(self, device: HostDevice) -> None:
        """Belong to `device`."""
        super().__init__(device)
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._lane = Lane(self._queue.put)
        self._thread: Thread | None = None
        self._starting = Lock()
        self._closed = False

    def _put(self, *item: Any) -> None:
        if self._thread is None:
            self._start()
        self._queue.put(item)

    def _start(self) -> None:
        with self._starting:
            if self._closed:
                raise DeviceError(
                    "stream of host",
                    expected="an open stream",
                    got="a closed one",
                    remedy="Make a new one with device.stream().",
                )
            if self._thread is None:
                self._thread = start_thread(self._lane, self._queue)

    def launch(self, kernel: str, tiles: int, *args: int | float, split: bool = True, grain: int = 64) -> None:
        """Queue a kernel over the tiles 0 .. tiles-1, shared with idle cores unless `split` is False."""
        if not split:
            super().launch(kernel, tiles, *args)
        else:
            self._put(self._lane.work, workers().run, library.kernel(kernel), tiles, library.arguments(args), grain)

    def synchronize(self) -> None:
        """Wait for everything queued so far; raise what went wrong."""
        if self._thread is not None:
            super().synchronize()

    def close(self) -> None:
        """Finish what is queued and end the thread; raise what went wrong and nobody has asked for."""
        try:
            self.synchronize()
        finally:
            thread, self._thread, self._closed = self._thread, None, True
            if thread is not None:
                self._queue.put(None)
                thread.join()

    def __del__(self) -> None:
        """End the thread of a stream that was dropped, behind what is queued."""
        if getattr(self, "_thread", None) is not None:
            self._queue.put(None)


class HostDevice(Device):
    """The processor and its memory."""

    name = "host"
    appends_in_place = True

    def __init__(self) -> None:
        """Start with an empty pool."""
        self.pool = Pool(self, _allocate)

    def alloc(self, nbytes: int) -> Memory:
        """Take memory from the pool, aligned for any kernel."""
        return self.pool.take(nbytes)

    def pinned(self, nbytes: int) -> Memory:
        """Take memory from the pool: on the host all memory is within reach."""
        return self.pool.take(nbytes)

    def stream(self, *, inline: bool = False) -> Stream:
        """Make a new stream; an inline one runs its work at once in the calling thread."""
        return InlineStream(self) if inline else HostStream(self)


def _allocate(nbytes: int) -> tuple[int, object]:
    owner = np.empty(nbytes + ALIGNMENT, np.uint8)
    return -(-owner.ctypes.data // ALIGNMENT) * ALIGNMENT, owner
