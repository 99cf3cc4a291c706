"""Finds the schedule for a call in a directory of plans, where a communicator has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.plans import Plans

if TYPE_CHECKING:
    from mpi_gpucomp.comm.forms import Form
    from mpi_gpucomp.comm.nodes import Nodes
    from mpi_gpucomp.comm.options import Options, Settings

__all__ = ["Planned"]

COLLECTIVES = ("broadcast", "allreduce", "allgather", "reduce_scatter", "alltoall")
"""In the others the root alone knows whether it works in place, so ranks might find different plans."""


class Planned:
    """The plans of one communicator: all ranks look in the same directory, and find the same."""

    def __init__(self, ranks: int, nodes: Nodes, settings: Settings) -> None:
        """Look for plans of ranks that lie on nodes as these do, if there are any."""
        self._small, self._ranks = settings.small, ranks
        self._plans = None if settings.plans is None else Plans(settings.plans, nodes)

    def options(self, form: Form | None, options: Options) -> Options:
        """Return the options of a call with the plan that fits; as they are where none does or one was named."""
        if self._plans is None or form is None or form.counts is None or options.get("algorithm") is not None:
            return options
        nbytes = sum(form.counts) * form.some.buffer.dtype.itemsize
        if form.collective not in COLLECTIVES or nbytes <= self._small:
            return options
        plan = self._plans.find(form.collective, self._ranks, nbytes, form.root, in_place=form.in_place)
        return options if plan is None else {**options, "algorithm": plan}
