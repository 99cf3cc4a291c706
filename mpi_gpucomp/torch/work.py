"""Work objects of operations in flight, and the queue of a group's collectives.

The collectives of a group run one at a time in the order in which they were started, which torch requires to be the
same on all ranks. A synchronous collective runs in the caller's thread if the queue is empty, which saves two context
switches; the others run in the group's thread. Callbacks of futures run there too, before the next collective; a
collective that a callback starts runs at once, so that the callback may wait for it. Point-to-point messages are not
queued.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from mpi4py import MPI
from torch._C import _distributed_c10d as c10d

from mpi_gpucomp.torch.collectives import as_array, copy_back, flatten, wait_until
from mpi_gpucomp.torch.streams import Queued, current_streams, devices_of, on_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from torch import Tensor
    from torch.futures import Future

    from mpi_gpucomp.communicator import Communicator

__all__ = ["CollectiveWork", "OperationQueue", "P2PWork", "irecv", "isend", "seconds", "skip_dynamo"]

EXIT_SECONDS = 5.0
"""Time that queued collectives have to complete when the interpreter exits."""

Class = TypeVar("Class", bound=type)

_lock = threading.Lock()
_queues: weakref.WeakSet[OperationQueue] = weakref.WeakSet()
_Work: Any = c10d.Work  # the stub lists overloads that torch never calls


def skip_dynamo(cls: Class) -> Class:
    """Exclude the methods of a class, and the functions they call, from tracing by torch.compile.

    torch.compiler.disable has the same effect, but imports the whole compiler, which takes seconds.
    """
    with suppress(ImportError, AttributeError):  # a version of torch without this setting
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        for method in vars(cls).values():
            if isinstance(method, FunctionType):
                eval_frame.set_code_exec_strategy(method.__code__, strategy)
    return cls


def seconds(timeout: timedelta | None, default: float) -> float:
    """Return a torch timeout in seconds, or the default if it is None or not positive."""
    value = timeout.total_seconds() if timeout is not None else 0.0
    return value if value > 0 else default


def _timed_out(title: str, timeout: float) -> RuntimeError:
    return RuntimeError(f"{title}: Timed out waiting {timeout * 1000:.0f} ms for completion")


@skip_dynamo
class CollectiveWork(_Work):  # type: ignore[misc]
    """A collective in flight."""

    def __init__(self, title: str, result: Any, timeout: float) -> None:
        """Create the work of a collective: `result` is the value of its future, `timeout` the default of `wait`."""
        super().__init__()
        self._title, self._result, self._timeout = title, result, timeout
        self._error: Exception | None = None
        self._queued = Queued(())
        self._completed = False
        self._event: threading.Event | None = None
        self._future: Future[Any] | None = None

    def complete(self, error: Exception | None = None) -> None:
        """Mark the collective as completed or failed, and run the callbacks of its future.

        The thread's current streams are those on which it has queued the last of its work.
        """
        self._error = error
        if error is None:
            self._queued = Queued(self._result)
        with _lock:
            self._completed = True
            event, future = self._event, self._future
        if event is not None:
            event.set()
        if future is not None:
            self._resolve(future)

    def _resolve(self, future: Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            self._queued.precede()  # a future makes those who wait for it follow the current streams
            future.set_result(self._result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for completion; raise the collective's error, or RuntimeError after the timeout.

        What the caller then queues on its current streams follows the collective.
        """
        if not self._completed:
            limit = seconds(timeout, self._timeout)
            with _lock:
                self._event = self._event or threading.Event()
            if not self._completed and not self._event.wait(limit):
                raise _timed_out(self._title, limit)
        if self._error is not None:
            raise self._error
        self._queued.precede()
        return True

    def get_future(self) -> Future[Any]:
        """Return a future of the result."""
        with _lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future(devices=devices_of(self._result))
            completed = self._completed
        if completed:
            self._resolve(future)
        return future

    def is_completed(self) -> bool:
        """Return True if the collective has completed or failed."""
        return self._completed

    def is_success(self) -> bool:
        """Return True if the collective has completed without an error."""
        return self._completed and self._error is None

    def exception(self) -> Exception | None:
        """Return the error of the collective, or None."""
        return self._error

    def result(self) -> Any:
        """Return the tensors of the result."""
        return self._result

    def synchronize(self) -> None:
        """Wait for completion."""
        self.wait()


class OperationQueue:
    """Runs the collectives of one group, one at a time and in order."""

    def __init__(self, title: str) -> None:
        """Create an empty queue; its thread starts with the first collective that needs it."""
        self._title = title
        self._pending: deque[tuple[CollectiveWork, Callable[[], None], list[Any]]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        """True while a collective, or the callbacks of one, are running."""
        self._thread: threading.Thread | None = None
        self._closed = False
        _queues.add(self)

    def run(
        self, work: CollectiveWork, function: Callable[[], None], *, inline: bool, tensors: Sequence[Tensor]
    ) -> CollectiveWork:
        """Run a collective after those in the queue; `inline` allows the caller's thread if the queue is empty."""
        if threading.current_thread() is self._thread:
            _run(work, function)
            return work
        with self._changed:
            # A closed queue has no thread: run the function here, where the freed communicator raises its error.
            here = self._closed or (inline and not self._busy and not self._pending)
            self._busy = self._busy or here
            if not here:
                self._pending.append((work, function, current_streams(tensors)))
                self._start()
                self._changed.notify_all()
        if here:
            try:
                _run(work, function)
            finally:
                with self._changed:
                    self._busy = False
                    if self._pending:
                        self._changed.notify_all()
        return work

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"gpucomp-{self._title}", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._ready)
                if not self._pending:
                    return
                work, function, streams = self._pending.popleft()
                self._busy = True
            with on_streams(streams):
                _run(work, function)
            del work, function, streams  # release the tensors before the next wait
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _ready(self) -> bool:
        return not self._busy if self._pending else self._closed

    def drain(self, timeout: float) -> bool:
        """Wait until the queue is empty; return False after `timeout` seconds."""
        if threading.current_thread() is self._thread:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending and not self._busy, timeout)

    def close(self, timeout: float) -> bool:
        """Stop the thread once the queue is empty; return False if it is still running after `timeout` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline, thread = time.monotonic() + timeout, self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(max(0.0, deadline - time.monotonic()))
        return not thread.is_alive()


def _run(work: CollectiveWork, function: Callable[[], None]) -> None:
    try:
        function()
    except Exception as error:
        work.complete(error)
    else:
        work.complete()


@atexit.register
def _close_queues() -> None:
    """Complete queued collectives before MPI is finalised."""
    for queue in list(_queues):
        queue.close(EXIT_SECONDS)


def isend(comm: Communicator, tensor: Tensor, dest: int, tag: int, timeout: float) -> P2PWork:
    """Start a send."""
    request = comm.Isend(as_array(flatten(tensor)), dest, tag)
    return P2PWork(f"send to rank {dest}", request, tensor, None, timeout)


def irecv(comm: Communicator, tensor: Tensor, source: int | None, tag: int, timeout: float) -> P2PWork:
    """Start a receive, from any rank if `source` is None."""
    flat = flatten(tensor)
    title = "recv from any rank" if source is None else f"recv from rank {source}"
    request = comm.Irecv(as_array(flat), MPI.ANY_SOURCE if source is None else source, tag)
    return P2PWork(title, request, tensor, flat, timeout)


@skip_dynamo
class P2PWork(_Work):  # type: ignore[misc]
    """A point-to-point message in flight; progress is made by `wait` and `is_completed`."""

    def __init__(self, title: str, request: Any, tensor: Tensor, received: Tensor | None, timeout: float) -> None:
        """Create the work of a message; `received` is the vector that a receive writes to."""
        super().__init__()
        self._title, self._request, self._timeout = title, request, timeout
        self._tensor, self._received = tensor, received
        self._status = MPI.Status()
        self._queued = Queued(())
        self._lock = threading.Lock()
        self._completed = False
        self._error: Exception | None = None
        self._future: Future[Any] | None = None

    def is_completed(self) -> bool:
        """Return True if the message has completed or failed."""
        with self._lock:
            if not self._completed:
                self._poll()
            return self._completed

    def _poll(self) -> None:
        try:
            if not self._request.Test(self._status):
                return
            if self._received is not None:
                copy_back(self._tensor, self._received)
                self._queued = Queued(self._tensor)
        except Exception as error:
            self._error = error
        self._completed, self._received = True, None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for completion; raise the message's error, or RuntimeError after the timeout."""
        limit = seconds(timeout, self._timeout)
        if not wait_until(self.is_completed, limit):
            raise _timed_out(self._title, limit)
        if self._error is not None:
            raise self._error
        self._queued.precede()
        return True

    def is_success(self) -> bool:
        """Return True if the message has completed without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return the error of the message, or None."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensor in a list."""
        return [self._tensor]

    def source_rank(self) -> int:
        """Return the sender of a completed receive."""
        return self._status.Get_source()

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait for completion."""
        self.wait()

    def get_future(self) -> Future[Any]:
        """Return a future of the tensor; a thread waits for completion."""
        if self._future is None:
            self._future = torch.futures.Future(devices=devices_of(self._tensor))
            threading.Thread(target=self._resolve, args=(self._future,), daemon=True).start()
        return self._future

    def _resolve(self, future: Future[Any]) -> None:
        try:
            self.wait()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result([self._tensor])
