"""Collectives with names: registered, run by name, and listed when they are complete."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp._call.calls import FORMS
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp._dispatch.plan import CallOptions
    from mpi_gpucomp.engine.scheduling import Job

__all__ = ["Names", "Registered"]

MOST_COMPLETED = 1 << 16
"""Names that are kept for somebody to ask what was completed; nobody may ever do so."""


class Registered(NamedTuple):
    """A collective with a name: mpi4py's method, and options."""

    method: str
    options: CallOptions


class Names:
    """The names of one communicator."""

    def __init__(self, rank: int) -> None:
        """Start with none, on this rank."""
        self._rank = rank
        self._registered: dict[str, Registered] = {}
        self._completed: deque[str] = deque(maxlen=MOST_COMPLETED)

    def register(self, name: str, collective: str, options: CallOptions) -> None:
        """Keep the options of a named collective."""
        method = next((known for known in FORMS if known.lower() == collective.lower()), None)
        if method is None or name in self._registered:
            raise SpecError(
                f"register {name!r}",
                expected=f"one of {', '.join(map(str.lower, FORMS))}, and a name that is not taken",
                got=f"{collective!r}" if method is None else "a name that stands for a collective already",
                remedy="Choose another name, or mpi4py's name of the collective.",
                rank=self._rank,
            )
        self._registered[name] = Registered(method, options)

    def find(self, name: str) -> Registered:
        """Return what was registered under a name."""
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
        """Return the names of what was completed since the last time, in that order."""
        return [self._completed.popleft() for _ in range(len(self._completed))]

    def told(self, name: str, options: CallOptions) -> Callable[[Job], None] | None:
        """Return what is to be called when a job is over: it keeps the name, and calls back."""
        callback, failed = options.get("callback"), options.get("on_error")

        def told(job: Job) -> None:
            if name:
                self._completed.append(name)
            if job.error is not None and failed is not None:
                failed(job.error)
            elif callback is not None and job.error is None:
                callback()

        return told if name or callback or failed else None
