"""The event loop of the rails: one thread for all communicators of a process.

It connects, authenticates and reconnects; connections that are made belong to the core. All state of the rails in
Python is guarded by one lock, which the thread holds only while it works.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    OnReady = Callable[[bool, bool], None]

__all__ = ["EventLoop", "acquire", "release"]

_log = logging.getLogger("mpi_gpucomp")
_CLOSED = select.EPOLLHUP | select.EPOLLERR
_READ, _WRITE = select.EPOLLIN | _CLOSED, select.EPOLLOUT


class _HasFileno(Protocol):
    def fileno(self) -> int:
        """Return the file descriptor to poll."""


class EventLoop:
    """File descriptors and timers, and their callbacks."""

    def __init__(self) -> None:
        """Start the thread."""
        self.lock = threading.RLock()
        self._poll, self._wake = select.epoll(), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN)
        self._callbacks: dict[int, OnReady] = {}
        self._masks: dict[int, int] = {}
        self._timers: dict[Callable[[float], None], float] = {}
        self._soon: list[Callable[[], None]] = []
        self.users = 0
        self.on_error: list[Callable[[Exception], None]] = []
        """Called with an unexpected exception in the thread, which would otherwise go unnoticed."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="gpucomp-rails", daemon=True)
        self._thread.start()

    def register(
        self, connection: _HasFileno, on_ready: OnReady, *, reading: bool = True, writing: bool = False
    ) -> None:
        """Call `on_ready(readable, writable)` whenever a descriptor is ready; one that is closed is readable."""
        number, mask = connection.fileno(), (select.EPOLLIN if reading else 0) | (_WRITE if writing else 0)
        if number not in self._callbacks:
            self._poll.register(number, mask)
        elif self._masks[number] != mask:
            self._poll.modify(number, mask)
        self._callbacks[number], self._masks[number] = on_ready, mask

    def unregister(self, connection: _HasFileno) -> None:
        """Stop polling a descriptor that is about to be closed."""
        if self._callbacks.pop(connection.fileno(), None) is not None:
            self._poll.unregister(connection.fileno())

    def call_soon(self, work: Callable[[], None]) -> None:
        """Call a function once, after the other ready descriptors."""
        self._soon.append(work)
        if threading.current_thread() is not self._thread:
            os.eventfd_write(self._wake, 1)

    def call_every(self, seconds: float, tick: Callable[[float], None]) -> None:
        """Call a function periodically."""
        self._timers[tick] = seconds
        os.eventfd_write(self._wake, 1)

    def cancel_timer(self, tick: Callable[[float], None]) -> None:
        """Stop calling a function."""
        self._timers.pop(tick, None)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping:
            period = min(self._timers.values(), default=1.0)
            timeout = 0.0 if self._soon else max(0.0, min(due + period - time.monotonic(), period))
            ready = self._poll.poll(timeout)
            try:
                with self.lock:
                    due = self._dispatch(ready, due, period)
            except Exception as error:
                _log.exception("rails: internal error")
                for report in list(self.on_error):
                    report(error)

    def _dispatch(self, ready: list[tuple[int, int]], due: float, period: float) -> float:
        soon, self._soon = self._soon, []
        for work in soon:
            work()
        for number, mask in ready:
            if number == self._wake:
                os.eventfd_read(self._wake)
            elif (on_ready := self._callbacks.get(number)) is not None:
                mask &= self._masks[number] | _CLOSED  # another callback may have changed it since the poll
                if mask:
                    on_ready(bool(mask & _READ), bool(mask & _WRITE))
        now = time.monotonic()
        if now < due + period:
            return due
        for tick in list(self._timers):
            tick(now)
        return now

    def stop(self) -> None:
        """End the thread and close the descriptors."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._poll.close()
            os.close(self._wake)


_shared: EventLoop | None = None
_guard = threading.Lock()


def acquire() -> EventLoop:
    """Return the process's event loop, started on first use; pair it with `release`."""
    global _shared
    with _guard:
        if _shared is None:
            _shared = EventLoop()
        _shared.users += 1
        return _shared


def release(loop: EventLoop) -> None:
    """Stop using the event loop; the last user stops it."""
    global _shared
    with _guard:
        loop.users -= 1
        last = not loop.users
        if last and _shared is loop:
            _shared = None
    if last:
        loop.stop()
