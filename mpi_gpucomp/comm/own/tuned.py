"""MPI's own collective with the algorithm that is fastest for a size, found by trying all while the job runs.

Libraries look at their settings at different times, which was found out by trying: Open MPI when a communicator is
made, which then keeps them for its life, so each candidate gets a duplicate; MPICH in every call, so the settings stand
around the call, and hold for other communicators meanwhile.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from mpi4py import MPI

from mpi_gpucomp.comm.own import control
from mpi_gpucomp.comm.own.algorithms import candidates, family

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from contextlib import AbstractContextManager

    from mpi_gpucomp.comm.own.algorithms import Candidate

__all__ = ["Better", "Tuned", "keeps_settings"]

PROMISING = 2.0
"""How many times the best time another candidate may take to be worth a try with other lengths."""
HOPELESS = 3.0
"""How many times the best time so far the first try of a candidate may take before it is given up."""
WORTH_GIVING_UP = 0.02
"""Seconds below which a first try, which may have had connections to make, does not count against a candidate."""


def keeps_settings() -> bool:
    """Say whether a communicator keeps the settings that it was made with.

    Only then is it safe to use them beside a program's own calls: settings that hold for the whole process may change
    the algorithm of a call that another thread makes, on this rank alone.
    """
    found = family()
    return found is not None and not found.per_call


LONG = 1 << 22


class Better(NamedTuple):
    """A communicator on which a collective is faster than on the one that it is a duplicate of, for some lengths."""

    comm: MPI.Intracomm
    least: int
    below: float

    def suits(self, nbytes: int) -> bool:
        """Say whether it is for messages of this length."""
        return self.least <= nbytes < self.below

    def without(self, nbytes: int) -> Better:
        """Leave out a length for which it is slower: with all that is shorter, or longer if it was good for that."""
        return self._replace(below=float(nbytes)) if nbytes > LONG else self._replace(least=nbytes + 1)


class Tuned:
    """One collective on one communicator; make one for each size, and close it."""

    def __init__(self, comm: MPI.Intracomm, collective: str) -> None:
        """Let all ranks make one; until a sweep it is the library's default."""
        self._comm, self._candidates, self.collective = comm, candidates(collective), collective
        found = family()
        self._per_call = found is None or found.per_call
        self.times: dict[str, float] = {}
        """What a sweep has measured: seconds of the slowest rank in the best round of each candidate."""
        self._winner, self._held = self._candidates[0], comm
        self._others: dict[str, MPI.Intracomm] = {}

    def sweep(self, call: Callable[[MPI.Intracomm], float], rounds: int = 2) -> str:
        """Let all ranks try every candidate and return the name of the fastest.

        `call` runs the collective once on the communicator it is given and returns the seconds that it took.
        """
        self.close()
        self.times = {}
        for candidate in self._candidates:
            comm = self._made(candidate)
            seconds = self._measured(candidate, comm, call, rounds)
            is_best = seconds < min(self.times.values(), default=float("inf"))
            self.times[candidate.name] = seconds
            self._free(self._held if is_best else comm)
            if is_best:
                self._winner, self._held = candidate, comm
        return self._winner.name

    @contextmanager
    def best(self) -> Iterator[MPI.Intracomm]:
        """Give the communicator on which the collective takes the best algorithm until the end of the block."""
        with self._under(self._winner):
            yield self._held

    def promising(self, besides: Collection[str] = ()) -> dict[str, MPI.Intracomm]:
        """Let all ranks make a communicator for each candidate that came near the best, by its name.

        Those of `besides`, which somebody has already, are left out, and all where communicators keep no settings.
        """
        limit = PROMISING * min(self.times.values(), default=0.0)
        near = [one for one in self._candidates if self.times.get(one.name, limit) < limit and one.settings]
        for candidate in () if self._per_call else near:
            if candidate.name not in {self._winner.name, *self._others, *besides}:
                self._others[candidate.name] = self._made(candidate)
        return {self._winner.name: self._held, **self._others}

    def close(self) -> None:
        """Let all ranks go back to the default, and free what was made."""
        for comm in (self._held, *self._others.values()):
            self._free(comm)
        self._others = {}
        self._winner, self._held = self._candidates[0], self._comm

    def _made(self, candidate: Candidate) -> MPI.Intracomm:
        """Return a communicator that has the candidate's settings, if that is where they are kept."""
        if self._per_call or not candidate.settings:
            return self._comm
        with control.settings(candidate.settings):
            made = self._comm.Dup()
        made.Set_name(candidate.name)
        return made

    def _under(self, candidate: Candidate) -> AbstractContextManager[None]:
        """Return what has to stand around the call."""
        return control.settings(candidate.settings if self._per_call else {})

    def _free(self, comm: MPI.Intracomm) -> None:
        if comm is not self._comm:
            comm.Free()

    def _measured(
        self, candidate: Candidate, comm: MPI.Intracomm, call: Callable[[MPI.Intracomm], float], rounds: int
    ) -> float:
        """Return the seconds of the best round; a candidate whose first is hopeless has no other."""
        best = float("inf")
        limit = max(WORTH_GIVING_UP, HOPELESS * min(self.times.values(), default=best))
        for _ in range(rounds):
            with self._under(candidate):
                seconds = call(comm)
            best = min(best, self._comm.allreduce(seconds, MPI.MAX))
            if best > limit:
                break
        return best
