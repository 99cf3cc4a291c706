"""Faults on the wires of this process: damaged messages, and signals at a certain message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.core.library import core

if TYPE_CHECKING:
    from mpi_gpucomp import Communicator

FLIP, CUT, REPEAT = 0, 1, 2
_faulty: dict[int, int] = {}
"""Wires by the contexts that they belong to."""


def install() -> None:
    """Put every wire made from now on into one that can have faults."""
    library = core()
    new_context = library.gc_context_new

    def faulty_context(wire: int) -> int:
        faulty = library.gc_faulty_wire(wire)
        context: int = new_context(faulty)
        _faulty[context] = faulty
        return context

    library.gc_context_new = faulty_context


def wire_of(comm: Communicator) -> int:
    """Return the wire of a communicator."""
    return _faulty[comm._runtime.wire.handle]


def signal_after(comm: Communicator, messages: int, number: int) -> None:
    """Signal this process at the n-th message that it sends or receives."""
    core().gc_faulty_signal_after(wire_of(comm), messages, number)
