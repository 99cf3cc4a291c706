"""The thread that moves what is on sockets: one for all communicators of a process.

All that belongs to rails is looked at and changed under one lock, which the thread holds only while it works. Whoever
has something to send tries it at once, and leaves the rest to the thread.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Ready = Callable[[bool, bool], None]

__all__ = ["Loop", "leave", "shared"]

_log = logging.getLogger("mpi_gpucomp")
_READ, _WRITE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR, select.EPOLLOUT


class _Watched(Protocol):
    def fileno(self) -> int:
        """Return what is polled."""


class _Flushed(Protocol):
    def flush(self) -> None:
        """Send what there is."""


class Loop:
    """Sockets and the like, and who is told when they are ready."""

    def __init__(self) -> None:
        """Start the thread."""
        self.lock = threading.RLock()
        self._poll, self._wake = select.epoll(), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN)
        self._ready: dict[int, Ready] = {}
        self._masks: dict[int, int] = {}
        self._dirty: dict[_Flushed, None] = {}
        self._ticks: dict[Callable[[float], None], float] = {}
        self._again: list[Callable[[], None]] = []
        self.users = 0
        self.when_broken: list[Callable[[Exception], None]] = []
        """Who is told of a mistake in here, which would otherwise be silence."""
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="gpucomp-rails", daemon=True)
        self._thread.start()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock, and send in the end what has come up meanwhile."""
        with self.lock:
            yield
            self._flush()

    def watch(self, connection: _Watched, ready: Ready, *, writing: bool = False) -> None:
        """Call `ready` with whether a socket can be read and written, from now on."""
        number, mask = connection.fileno(), select.EPOLLIN | (_WRITE if writing else 0)
        if number not in self._ready:
            self._poll.register(number, mask)
        elif self._masks[number] != mask:
            self._poll.modify(number, mask)
        self._ready[number], self._masks[number] = ready, mask

    def forget(self, connection: _Watched) -> None:
        """Watch a socket no more; it is about to be closed."""
        if self._ready.pop(connection.fileno(), None) is not None:
            self._poll.unregister(connection.fileno())

    def to_flush(self, path: _Flushed) -> None:
        """Let a path send when whoever holds the lock is through."""
        self._dirty[path] = None

    def _flush(self) -> None:
        while self._dirty:
            path = next(iter(self._dirty))
            del self._dirty[path]
            path.flush()

    def again(self, work: Callable[[], None]) -> None:
        """Call something once more when the others have had their turn."""
        self._again.append(work)
        if threading.current_thread() is not self._thread:
            os.eventfd_write(self._wake, 1)

    def every(self, seconds: float, tick: Callable[[float], None]) -> None:
        """Call something again and again."""
        self._ticks[tick] = seconds
        os.eventfd_write(self._wake, 1)

    def no_more(self, tick: Callable[[float], None]) -> None:
        """Call it no more."""
        self._ticks.pop(tick, None)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._ending:
            pause = min(self._ticks.values(), default=1.0)
            patience = 0.0 if self._again else max(0.0, min(due + pause - time.monotonic(), pause))
            found = self._poll.poll(patience)
            try:
                with self.held():
                    due = self._turn(found, due, pause)
            except Exception as error:
                _log.exception("rails: a mistake of ours")
                for tell in list(self.when_broken):
                    tell(error)

    def _turn(self, found: list[tuple[int, int]], due: float, pause: float) -> float:
        waiting, self._again = self._again, []
        for work in waiting:
            work()
        for number, mask in found:
            if number == self._wake:
                os.eventfd_read(self._wake)
            elif (ready := self._ready.get(number)) is not None:
                ready(bool(mask & _READ), bool(mask & _WRITE))
        now = time.monotonic()
        if now < due + pause:
            return due
        for tick in list(self._ticks):
            tick(now)
        return now

    def end(self) -> None:
        """End the thread and let go of everything."""
        self._ending = True
        os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._poll.close()
            os.close(self._wake)


_shared: Loop | None = None
_guard = threading.Lock()


def shared() -> Loop:
    """Return the loop of this process, for one more who uses it and calls `leave` in the end."""
    global _shared
    with _guard:
        if _shared is None:
            _shared = Loop()
        _shared.users += 1
        return _shared


def leave(loop: Loop) -> None:
    """Use the loop no more; the last one ends it."""
    global _shared
    with _guard:
        loop.users -= 1
        last = not loop.users
        if last and _shared is loop:
            _shared = None
    if last:
        loop.end()
