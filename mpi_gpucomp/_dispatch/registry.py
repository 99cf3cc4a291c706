"""Named collectives: registered, run by name, and listed when they have completed (DFCCL's interface)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp._call.calls import check_options, find_method
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp._call.calls import CallOptions
    from mpi_gpucomp.engine.scheduling import Job

__all__ = ["NameRegistry", "NamedCollective"]

MAX_COMPLETED = 1 << 16
"""Completed names that are kept for `completed()`, which may never be called."""


class NamedCollective(NamedTuple):
    """mpi4py's method and the options of a named collective."""

    method: str
    options: CallOptions


class NameRegistry:
    """The named collectives of one communicator."""

    def __init__(self, rank: int) -> None:
        """Start empty, on this rank."""
        self._rank = rank
        self._registered: dict[str, NamedCollective] = {}
        self._completed: deque[str] = deque(maxlen=MAX_COMPLETED)

    def register(self, name: str, collective: str, options: CallOptions) -> None:
        """Register a name for a collective and its options."""
        method = find_method(f"register {name!r}", collective, self._rank)
        if name in self._registered:
            raise SpecError(
                f"register {name!r}",
                expected="a new name",
                got="a name that is registered already",
                remedy="Choose another name.",
                rank=self._rank,
            )
        check_options(f"register {name!r}", options, self._rank)
        self._registered[name] = NamedCollective(method, options)

    def find(self, name: str) -> NamedCollective:
        """Return the collective registered under a name."""
        known = self._registered.get(name)
        if known is None:
            raise SpecError(
                f"run {name!r}",
                expected=f"a registered name: {', '.join(sorted(self._registered)) or 'there is none'}",
                got=repr(name),
                remedy="Call register(name, collective) first.",
                rank=self._rank,
            )
        return known

    def completed(self) -> list[str]:
        """Return the names completed since the last call, in order."""
        return [self._completed.popleft() for _ in range(len(self._completed))]

    def completion_callback(self, name: str, options: CallOptions) -> Callable[[Job], None] | None:
        """Return what a job calls when it has ended: it records the name, and calls the user's callbacks."""
        callback, on_error = options.get("callback"), options.get("on_error")

        def on_done(job: Job) -> None:
            if name:
                self._completed.append(name)
            if job.error is not None and on_error is not None:
                on_error(job.error)
            elif callback is not None and job.error is None:
                callback()

        return on_done if name or callback or on_error else None
