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
from contextlib import nullcontext, suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from mpi4py import MPI
from torch._C import _distributed_c10d as c10d

from mpi_gpucomp.torch.collectives import Patience, elements, flat, settle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from datetime import timedelta

    from torch import Tensor
    from torch.futures import Future

    from mpi_gpucomp.communicator import Communicator

__all__ = ["Line", "Message", "Messages", "Operation", "gpus", "seconds", "unseen"]


# Keeps torch.compile out of the backend: a compiled model that synchronises in its forward would have it traced.

Class = TypeVar("Class", bound=type)


def unseen(cls: Class) -> Class:
    """Let the methods of a class, and what they call, run as they are, even inside a compiled model.

    torch.compiler.disable would do it too, and import the whole compiler, which takes seconds.
    """
    with suppress(ImportError, AttributeError):  # a torch whose compiler has no such setting
        from torch._C._dynamo import eval_frame

        frames = eval_frame._FrameAction.SKIP
        leave = eval_frame._FrameExecStrategy(frames, frames)
        for method in vars(cls).values():
            if isinstance(method, FunctionType):
                eval_frame.set_code_exec_strategy(method.__code__, leave)
    return cls


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


# Messages between two ranks of a group: started at once, whatever collectives are in line.


class Messages:
    """The messages of one group."""

    def __init__(self, communicator: Communicator, timeout: float) -> None:
        """Send and receive by this communicator."""
        self._comm, self.timeout = communicator, timeout

    def send(self, tensor: Tensor, to: int, tag: int) -> Message:
        """Start to send."""
        row = flat(tensor)
        return Message(f"send to rank {to}", self._comm.Isend(elements(row), to, tag), tensor, None, self.timeout)

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Message:
        """Start to receive; from any rank if None."""
        row = flat(tensor)
        title = "recv from any rank" if source is None else f"recv from rank {source}"
        request = self._comm.Irecv(elements(row), MPI.ANY_SOURCE if source is None else source, tag)
        return Message(title, request, tensor, row, self.timeout)


_messages_Base: Any = c10d.Work


@unseen
class Message(_messages_Base):  # type: ignore[misc]
    """A message that was started; whoever waits for it or looks at it brings it forward."""

    def __init__(self, title: str, request: Any, tensor: Tensor, row: Tensor | None, timeout: float) -> None:
        """Be under way. `row` is where a message arrives that is received."""
        super().__init__()
        self._title, self._request, self._tensor, self._row, self._timeout = title, request, tensor, row, timeout
        self._status = MPI.Status()
        self._lock = threading.Lock()
        self._over = False
        self._error: Exception | None = None
        self._future: Future[Any] | None = None

    def is_completed(self) -> bool:
        """Say whether it is over."""
        with self._lock:
            if not self._over:
                self._look()
            return self._over

    def _look(self) -> None:
        try:
            if not self._request.Test(self._status):
                return
            if self._row is not None:
                settle(self._tensor, self._row)
        except Exception as error:
            self._error = error
        self._over, self._row = True, None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is over; raise what went wrong."""
        limit, patience = seconds(timeout, self._timeout), Patience()
        until = time.monotonic() + limit
        while not self.is_completed():
            if time.monotonic() > until:
                raise RuntimeError(f"{self._title}: Timed out waiting {limit * 1000:.0f} ms for it to complete")
            patience.rest()
        if self._error is not None:
            raise self._error
        return True

    def is_success(self) -> bool:
        """Say whether it is over and went well."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return what went wrong, if anything did."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensor."""
        return [self._tensor]

    def source_rank(self) -> int:
        """Return who has sent it, once it is there."""
        return self._status.Get_source()

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait until it is over."""
        self.wait()

    def get_future(self) -> Future[Any]:
        """Return a future that holds the tensor when it is over; a thread waits for it."""
        if self._future is None:
            self._future = torch.futures.Future(devices=gpus(self._tensor))
            threading.Thread(target=self._fill, args=(self._future,), daemon=True).start()
        return self._future

    def _fill(self, future: Future[Any]) -> None:
        try:
            self.wait()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result([self._tensor])
