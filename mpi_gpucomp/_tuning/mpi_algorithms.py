"""The algorithms that an MPI library has for its collectives, as settings of its control variables.

The tables hold what is worth trying with large messages; what the library at hand does not have is left out.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from mpi4py import MPI

from mpi_gpucomp._tuning import mpi_t as control
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    Settings = Mapping[str, int | float | str]
    from collections.abc import Callable, Collection, Iterator
    from contextlib import AbstractContextManager

__all__ = [
    "COLLECTIVES",
    "DEFAULT",
    "FAMILIES",
    "Better",
    "Candidate",
    "Family",
    "Tuned",
    "candidates",
    "family",
    "keeps_settings",
    "known",
]

DEFAULT = "default"
COLLECTIVES = (
    "bcast",
    "reduce",
    "allreduce",
    "allgather",
    "reduce_scatter",
    "reduce_scatter_block",
    "alltoall",
    "gather",
    "scatter",
)
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Candidate:
    """One way in which the library can do a collective."""

    name: str
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """A library and those that descend from it."""

    name: str
    common: Settings
    """What must be set for an algorithm to be taken; a library that has these variables is of the family."""
    per_call: bool
    """Whether variables are looked at in each call, and not when the communicator is made."""
    table: Mapping[str, Mapping[str, Settings]]
    """For each collective the settings of each algorithm, by its name."""


def _open_mpi(collective: str, algorithm: str, **more: int) -> Settings:
    stem = f"coll_tuned_{collective}_algorithm"
    return {stem: algorithm, **{f"{stem}_{name}": value for name, value in more.items()}}


def _mpich(collective: str, algorithm: str, **more: int) -> Settings:
    stem = f"MPIR_CVAR_{collective.upper()}"
    return {f"{stem}_INTRA_ALGORITHM": algorithm, **{f"{stem}_{name}": value for name, value in more.items()}}


def _mpich_tree(collective: str, algorithm: str, segment: int, **more: int) -> Settings:
    """Let segments follow each other down a tree; its type is read at MPI's start, and has to stay as it is."""
    return _mpich(collective, algorithm, TREE_PIPELINE_CHUNK_SIZE=segment, **more)


OPEN_MPI = Family(
    "Open MPI",
    # Among several hosts with several ranks each, another component would come first.
    {"coll_tuned_use_dynamic_rules": 1, "coll_tuned_priority": 100},
    per_call=False,
    table={
        "bcast": {
            # Short segments are sent with no handshake, which is slow where ranks that poll share cores.
            "pipeline, 32 KiB segments": _open_mpi("bcast", "pipeline", segmentsize=32 * KIB),
            "pipeline, 1 MiB segments": _open_mpi("bcast", "pipeline", segmentsize=MIB),
            "pipeline, 2 MiB segments": _open_mpi("bcast", "pipeline", segmentsize=2 * MIB),
            "split binary tree, 32 KiB segments": _open_mpi("bcast", "split_binary_tree", segmentsize=32 * KIB),
            "binomial tree": _open_mpi("bcast", "binomial", segmentsize=0),
            "scatter, then ring all-gather": _open_mpi("bcast", "scatter_allgather_ring"),
        },
        "reduce": {
            "pipeline, 32 KiB segments": _open_mpi("reduce", "pipeline", segmentsize=32 * KIB),
            "pipeline, 1 MiB segments": _open_mpi("reduce", "pipeline", segmentsize=MIB),
            "binary tree, 32 KiB segments": _open_mpi("reduce", "binary", segmentsize=32 * KIB),
            "binomial tree": _open_mpi("reduce", "binomial", segmentsize=0),
            "Rabenseifner": _open_mpi("reduce", "rabenseifner"),
        },
        "allreduce": {
            "ring": _open_mpi("allreduce", "ring"),
            "segmented ring, 256 KiB segments": _open_mpi("allreduce", "segmented_ring", segmentsize=256 * KIB),
            "segmented ring, 1 MiB segments": _open_mpi("allreduce", "segmented_ring", segmentsize=MIB),
            "recursive doubling": _open_mpi("allreduce", "recursive_doubling"),
            "Rabenseifner": _open_mpi("allreduce", "rabenseifner"),
        },
        "allgather": {
            "ring": _open_mpi("allgather", "ring"),
            "neighbor exchange": _open_mpi("allgather", "neighbor"),
            "Bruck": _open_mpi("allgather", "bruck"),
            "recursive doubling": _open_mpi("allgather", "recursive_doubling"),
            # Not sparbit: its results are wrong in place.
        },
        "reduce_scatter": {
            "ring": _open_mpi("reduce_scatter", "ring"),
            "recursive halving": _open_mpi("reduce_scatter", "recursive_halving"),
            "butterfly": _open_mpi("reduce_scatter", "butterfly"),
        },
        "reduce_scatter_block": {
            "recursive doubling": _open_mpi("reduce_scatter_block", "recursive_doubling"),
            "recursive halving": _open_mpi("reduce_scatter_block", "recursive_halving"),
            "butterfly": _open_mpi("reduce_scatter_block", "butterfly"),
        },
        "alltoall": {
            "linear": _open_mpi("alltoall", "linear"),
            "pairwise": _open_mpi("alltoall", "pairwise"),
            "modified Bruck": _open_mpi("alltoall", "modified_bruck"),
            "linear, 2 at a time": _open_mpi("alltoall", "linear_sync", max_requests=2),
        },
        "gather": {
            "linear": _open_mpi("gather", "basic_linear"),
            "binomial tree": _open_mpi("gather", "binomial"),
            "linear, by turns": _open_mpi("gather", "linear_sync", segmentsize=32 * KIB),
        },
        "scatter": {
            "linear": _open_mpi("scatter", "basic_linear"),
            "binomial tree": _open_mpi("scatter", "binomial"),
            "linear, all at once": _open_mpi("scatter", "linear_nb", max_requests=0),
        },
    },
)

MPICH = Family(
    "MPICH",
    {"MPIR_CVAR_DEVICE_COLLECTIVES": "none"},
    per_call=True,
    table={
        "bcast": {
            "pipeline, 64 KiB segments": _mpich_tree("bcast", "pipelined_tree", 64 * KIB, TREE_KVAL=1),
            "pipeline, 256 KiB segments": _mpich_tree("bcast", "pipelined_tree", 256 * KIB, TREE_KVAL=1),
            "pipeline, 1 MiB segments": _mpich_tree("bcast", "pipelined_tree", MIB, TREE_KVAL=1),
            "binomial tree": _mpich("bcast", "binomial"),
            "scatter, then recursive doubling": _mpich("bcast", "scatter_recursive_doubling_allgather"),
            "scatter, then ring all-gather": _mpich("bcast", "scatter_ring_allgather"),
        },
        "reduce": {
            "binomial tree": _mpich("reduce", "binomial"),
            "reduce-scatter, then gather": _mpich("reduce", "reduce_scatter_gather"),
            "nonblocking": _mpich("reduce", "nb"),
        },
        "allreduce": {
            "ring": _mpich("allreduce", "ring"),
            "pipelined tree, 1 MiB segments": _mpich_tree("allreduce", "tree", MIB),
            "recursive doubling": _mpich("allreduce", "recursive_doubling"),
            "recursive exchange": _mpich("allreduce", "recexch"),
            "reduce-scatter, then all-gather": _mpich("allreduce", "reduce_scatter_allgather"),
        },
        "allgather": {
            "ring": _mpich("allgather", "ring"),
            "Bruck": _mpich("allgather", "brucks"),
            "recursive doubling": _mpich("allgather", "recursive_doubling"),
            "recursive exchange, doubling": _mpich("allgather", "recexch_doubling"),
            "recursive exchange, halving": _mpich("allgather", "recexch_halving"),
        },
        "reduce_scatter": {
            "pairwise": _mpich("reduce_scatter", "pairwise"),
            "recursive doubling": _mpich("reduce_scatter", "recursive_doubling"),
            "recursive halving": _mpich("reduce_scatter", "recursive_halving"),
        },
        "reduce_scatter_block": {
            "pairwise": _mpich("reduce_scatter_block", "pairwise"),
            "recursive doubling": _mpich("reduce_scatter_block", "recursive_doubling"),
            "recursive halving": _mpich("reduce_scatter_block", "recursive_halving"),
        },
        "alltoall": {
            "Bruck": _mpich("alltoall", "brucks"),
            "pairwise": _mpich("alltoall", "pairwise"),
            "scattered": _mpich("alltoall", "scattered"),
        },
        "gather": {
            "binomial tree": _mpich("gather", "binomial"),
            "nonblocking": _mpich("gather", "nb"),
        },
        "scatter": {
            "binomial tree": _mpich("scatter", "binomial"),
            "nonblocking": _mpich("scatter", "nb"),
        },
    },
)

FAMILIES = (OPEN_MPI, MPICH)


def family() -> Family | None:
    """Return the family of the MPI library in use, or None if only its defaults are known here."""
    return next((family for family in FAMILIES if _has(family.common)), None)


def candidates(collective: str) -> list[Candidate]:
    """Return what the MPI library in use can do, its default first."""
    return [candidate for candidate in known(collective, family()) if _has(candidate.settings)]


def known(collective: str, of: Family | None) -> list[Candidate]:
    """Return the default and what a family may have besides."""
    if collective not in COLLECTIVES:
        raise SpecError(
            "collective",
            expected=f"one of {', '.join(COLLECTIVES)}",
            got=f"'{collective}'",
            remedy="Compare with mpi in place of mpi-tuned.",
        )
    if of is None:
        return [Candidate(f"{DEFAULT}, the only one that is known of this MPI library")]
    found = [Candidate(name, {**of.common, **settings}) for name, settings in of.table[collective].items()]
    return [Candidate(DEFAULT), *found]


def _has(settings: Settings) -> bool:
    return all(control.takes(name, value) for name, value in settings.items())


# The best of MPI's own: the algorithms that its library has, how to choose among them, and which is fastest here.
#
# Libraries choose by tables made for other networks. Open MPI's default broadcast of a large message among four
# hosts at
# 1 Gbit/s takes three times as long as its own pipeline.


# MPI's own collective with the algorithm that is fastest for a size, found by trying all while the job runs.
#
# Libraries look at their settings at different times, which was found out by trying: Open MPI when a communicator is
# made, which then keeps them for its life, so each candidate gets a duplicate; MPICH in every call, so the settings
# stand
# around the call, and hold for other communicators meanwhile.

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
