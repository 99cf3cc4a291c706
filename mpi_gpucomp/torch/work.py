"""What torch gets for an operation that was started, and the line in which a group's operations wait their turn.

Operations of a group run one at a time in the order in which they were started, which torch wants to be the same on
every rank. One that the caller waits for anyway runs in the caller's thread if nothing is before it: that saves two
changes of threads. The others run in a thread of the group, beside the caller. Callbacks of futures run there too,
before the next operation; what they start runs at once, so that they may wait for it.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _distributed_c10d as c10d

from mpi_gpucomp.torch.unseen import unseen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from datetime import timedelta

    from torch import Tensor
    from torch.futures import Future

__all__ = ["Line", "Operation", "gpus", "seconds"]

LEAVE_SECONDS = 5.0
"""How long the end of the interpreter waits for what is still in line."""
_futures = threading.Lock()
_lines: weakref.WeakSet[Line] = weakref.WeakSet()


def seconds(timeout: timedelta | None, otherwise: float) -> float:
    """Read one of torch's timeouts; none, or one that is not above zero, stands for the group's."""
    given = timeout.total_seconds() if timeout is not None else 0.0
    return given if given > 0 else otherwise


_Base: Any = c10d.Work


@unseen
class Operation(_Base):  # type: ignore[misc]
    """A collective that was started."""

    def __init__(self, title: str, result: Any, timeout: float) -> None:
        """Be under way; `result` is what the future will hold, and `timeout` how long `wait` waits by itself."""
        super().__init__()
        self._title, self._result, self._timeout = title, result, timeout
        self._error: Exception | None = None
        self._over = False
        self._ended: threading.Event | None = None
        self._future: Future[Any] | None = None

    def end(self, error: Exception | None = None) -> None:
        """Take notice that it is over, and call back."""
        self._error = error
        with _futures:
            self._over = True
            ended, future = self._ended, self._future
        if ended is not None:
            ended.set()
        if future is not None:
            self._fill(future)

    def _fill(self, future: Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is over; raise what went wrong."""
        if not self._over:
            limit = seconds(timeout, self._timeout)
            with _futures:
                self._ended = self._ended or threading.Event()
            if not self._over and not self._ended.wait(limit):
                raise RuntimeError(f"{self._title}: Timed out waiting {limit * 1000:.0f} ms for it to complete")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[Any]:
        """Return a future that holds the tensors when it is over."""
        with _futures:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future(devices=gpus(self._result))
            over = self._over
        if over:
            self._fill(future)
        return future

    def is_completed(self) -> bool:
        """Say whether it is over."""
        return self._over

    def is_success(self) -> bool:
        """Say whether it is over and went well."""
        return self._over and self._error is None

    def exception(self) -> Exception | None:
        """Return what went wrong, if anything did."""
        return self._error

    def result(self) -> Any:
        """Return the tensors."""
        return self._result

    def synchronize(self) -> None:
        """Wait until it is over."""
        self.wait()


def gpus(result: Any) -> list[int | str | torch.device]:
    """Return the devices that a future must know of: all but the processor."""
    found: dict[torch.device, None] = {}
    pending = [result]
    while pending:
        one = pending.pop()
        if isinstance(one, torch.Tensor):
            if one.device.type != "cpu":
                found[one.device] = None
        elif isinstance(one, (list, tuple)):
            pending.extend(one)
    return [*found]


class Line:
    """The operations of one group, one behind the other."""

    def __init__(self, title: str) -> None:
        """Start with nothing in line, and without a thread."""
        self._title = title
        self._waiting: deque[tuple[Operation, Callable[[], None], AbstractContextManager[Any]]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        """Whether an operation, or the callbacks of one, are running."""
        self._thread: threading.Thread | None = None
        self._closed = False
        _lines.add(self)

    def run(self, operation: Operation, act: Callable[[], None], *, inline: bool, on: Sequence[Tensor]) -> Operation:
        """Carry out an operation when its turn comes; `inline` if the caller waits for it anyway."""
        if threading.current_thread() is self._thread:
            _carry_out(operation, act)
            return operation
        with self._changed:
            # Behind the end nobody serves the line; the communicator will say that it was freed.
            mine = self._closed or (inline and not self._busy and not self._waiting)
            self._busy = self._busy or mine
            if not mine:
                self._waiting.append((operation, act, _stream_of(on)))
                self._start()
                self._changed.notify_all()
        if mine:
            try:
                _carry_out(operation, act)
            finally:
                with self._changed:
                    self._busy = False
                    if self._waiting:
                        self._changed.notify_all()
        return operation

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"gpucomp-{self._title}", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_go_on)
                if not self._waiting:
                    return
                operation, act, stream = self._waiting.popleft()
                self._busy = True
            with stream:
                _carry_out(operation, act)
            del operation, act, stream
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _may_go_on(self) -> bool:
        return not self._busy if self._waiting else self._closed

    def drain(self, limit: float) -> bool:
        """Wait until nothing is in line; say whether that is so."""
        if threading.current_thread() is self._thread:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, limit)

    def close(self, limit: float) -> bool:
        """End the thread behind what is in line; say whether it has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        until, thread = time.monotonic() + limit, self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(max(0.0, until - time.monotonic()))
        return not thread.is_alive()


def _carry_out(operation: Operation, act: Callable[[], None]) -> None:
    try:
        act()
    except Exception as error:
        operation.end(error)
    else:
        operation.end()


def _stream_of(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Return the caller's stream of a GPU, for a thread that has one of its own otherwise."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            return torch.cuda.stream(torch.cuda.current_stream(tensor.device))
    return nullcontext()


@atexit.register
def _leave() -> None:
    """Let what is in line come to its end before MPI does."""
    for line in list(_lines):
        line.close(LEAVE_SECONDS)
