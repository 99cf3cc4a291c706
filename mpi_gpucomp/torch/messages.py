"""Messages between two ranks of a group: started at once, whatever collectives are in line."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch._C import _distributed_c10d as c10d

from mpi_gpucomp.torch.patience import Patience
from mpi_gpucomp.torch.tensors import elements, flat, settle
from mpi_gpucomp.torch.unseen import unseen
from mpi_gpucomp.torch.work import gpus, seconds

if TYPE_CHECKING:
    from datetime import timedelta

    from torch import Tensor
    from torch.futures import Future

    from mpi_gpucomp.comm import Communicator

__all__ = ["Message", "Messages"]


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


_Base: Any = c10d.Work


@unseen
class Message(_Base):  # type: ignore[misc]
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
