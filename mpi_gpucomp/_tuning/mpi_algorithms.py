"""The collective algorithms of an MPI library, as settings of its control variables, and sweeps over them.

Libraries choose algorithms by tables made for other networks: Open MPI's default broadcast of a large message among
four hosts at 1 Gbit/s takes three times as long as its pipelined one. The tables here hold what is worth trying with
large messages, filtered by what the library at hand has.

When a library reads its settings was found by experiment. Open MPI reads them when a communicator is made, which then
keeps them, so each variant gets a duplicate. MPICH reads them in every call, so the settings are made around the call,
and affect other communicators meanwhile.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mpi4py import MPI

from mpi_gpucomp._tuning import mpi_t
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    Settings = Mapping[str, int | float | str]
    from collections.abc import Callable, Collection, Iterator, Sequence
    from contextlib import AbstractContextManager

__all__ = [
    "DEFAULT",
    "FAMILIES",
    "AlgorithmSweep",
    "Family",
    "TunedComm",
    "Variant",
    "agree_max",
    "family",
    "keeps_settings",
    "known_variants",
    "variants",
]

DEFAULT = "default"
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Variant:
    """One algorithm of the library for a collective."""

    name: str
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """An MPI library and its derivatives."""

    name: str
    common: Settings
    """Settings that every algorithm needs; a library that has these variables belongs to the family."""
    per_call: bool
    """True if variables are read in each call, False if when a communicator is made."""
    table: Mapping[str, Mapping[str, Settings]]
    """The settings of each algorithm, by collective and name."""


def _open_mpi(collective: str, algorithm: str, **more: int) -> Settings:
    stem = f"coll_tuned_{collective}_algorithm"
    return {stem: algorithm, **{f"{stem}_{name}": value for name, value in more.items()}}


def _mpich(collective: str, algorithm: str, **more: int) -> Settings:
    stem = f"MPIR_CVAR_{collective.upper()}"
    return {f"{stem}_INTRA_ALGORITHM": algorithm, **{f"{stem}_{name}": value for name, value in more.items()}}


def _mpich_tree(collective: str, algorithm: str, segment: int, **more: int) -> Settings:
    """Pipeline segments down a tree; the type of the tree is read when MPI starts and cannot be changed."""
    return _mpich(collective, algorithm, TREE_PIPELINE_CHUNK_SIZE=segment, **more)


OPEN_MPI = Family(
    "Open MPI",
    # With several ranks on each of several hosts another component would take precedence.
    {"coll_tuned_use_dynamic_rules": 1, "coll_tuned_priority": 100},
    per_call=False,
    table={
        "bcast": {
            # Short segments avoid the rendezvous handshake, which is slow where polling ranks share cores.
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
            "linear, 2 requests": _open_mpi("alltoall", "linear_sync", max_requests=2),
        },
        "gather": {
            "linear": _open_mpi("gather", "basic_linear"),
            "binomial tree": _open_mpi("gather", "binomial"),
            "linear, synchronised": _open_mpi("gather", "linear_sync", segmentsize=32 * KIB),
        },
        "scatter": {
            "linear": _open_mpi("scatter", "basic_linear"),
            "binomial tree": _open_mpi("scatter", "binomial"),
            "linear, non-blocking": _open_mpi("scatter", "linear_nb", max_requests=0),
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
    """Return the family of the MPI library in use, or None if it is unknown."""
    return next((family for family in FAMILIES if _has(family.common)), None)


def variants(collective: str) -> list[Variant]:
    """Return the variants that the MPI library in use has, its default first."""
    return [variant for variant in known_variants(collective, family()) if _has(variant.settings)]


def known_variants(collective: str, of: Family | None) -> list[Variant]:
    """Return the default and the variants that a family may have."""
    if collective not in OPEN_MPI.table:
        raise SpecError(
            "collective",
            expected=f"one of {', '.join(OPEN_MPI.table)}",
            got=f"'{collective}'",
            remedy="Compare with mpi in place of mpi-tuned.",
        )
    if of is None:
        return [Variant(f"{DEFAULT}, the only variant known for this MPI library")]
    found = [Variant(name, {**of.common, **settings}) for name, settings in of.table[collective].items()]
    return [Variant(DEFAULT), *found]


def _has(settings: Settings) -> bool:
    return all(mpi_t.takes(name, value) for name, value in settings.items())


PROMISING = 2.0
"""Variants within this multiple of the best time are worth measuring at other sizes."""
HOPELESS = 3.0
"""A variant whose first round takes more than this multiple of the best time is dropped."""
MIN_HOPELESS_SECONDS = 0.02
"""Below this duration a first round is no evidence: it may include the setup of connections."""


def keeps_settings() -> bool:
    """Return True if a communicator keeps the settings that it was made with.

    Otherwise settings affect the whole process: a call that another thread makes at the same time might run another
    algorithm on this rank than on the others.
    """
    found = family()
    return found is not None and not found.per_call


LONG_BYTES = 1 << 22


class TunedComm(NamedTuple):
    """A communicator on which a collective is faster than on its original, for a range of message sizes."""

    comm: MPI.Intracomm
    least: int
    below: float

    def covers(self, nbytes: int) -> bool:
        """Return True if the size is in the range."""
        return self.least <= nbytes < self.below

    def excluding(self, nbytes: int) -> TunedComm:
        """Return the range without a size at which it is slower, and all smaller ones, or all larger if it is long."""
        return self._replace(below=float(nbytes)) if nbytes > LONG_BYTES else self._replace(least=nbytes + 1)


class AlgorithmSweep:
    """Measures every variant of one collective on one communicator, at one message size."""

    def __init__(self, comm: MPI.Intracomm, collective: str) -> None:
        """Start with the default variant: collective."""
        self._comm, self._variants, self.collective = comm, variants(collective), collective
        found = family()
        self._per_call = found is None or found.per_call
        self.times: dict[str, float] = {}
        """Seconds of the slowest rank in the best round of each variant."""
        self._winner, self._winner_comm = self._variants[0], comm
        self._others: dict[str, MPI.Intracomm] = {}

    def sweep(self, call: Callable[[MPI.Intracomm], float], rounds: int = 2) -> str:
        """Measure every variant and return the name of the fastest: collective.

        `call` runs the collective once on the communicator it is given, and returns its duration in seconds.
        """
        self.close()
        self.times = {}
        for variant in self._variants:
            comm = self._comm_for(variant)
            seconds = self._measure(variant, comm, call, rounds)
            is_best = seconds < min(self.times.values(), default=float("inf"))
            self.times[variant.name] = seconds
            self._free(self._winner_comm if is_best else comm)
            if is_best:
                self._winner, self._winner_comm = variant, comm
        return self._winner.name

    @contextmanager
    def best(self) -> Iterator[MPI.Intracomm]:
        """Yield the communicator of the fastest variant; within the block its settings are in force."""
        with self._settings_for(self._winner):
            yield self._winner_comm

    def promising(self, besides: Collection[str] = ()) -> dict[str, MPI.Intracomm]:
        """Return a communicator for each variant near the best, by name: collective.

        Variants in `besides` are left out, and all but the winner where communicators do not keep settings.
        """
        limit = PROMISING * min(self.times.values(), default=0.0)
        near = [one for one in self._variants if self.times.get(one.name, limit) < limit and one.settings]
        for variant in () if self._per_call else near:
            if variant.name not in {self._winner.name, *self._others, *besides}:
                self._others[variant.name] = self._comm_for(variant)
        return {self._winner.name: self._winner_comm, **self._others}

    def close(self) -> None:
        """Return to the default and free the duplicates: collective."""
        for comm in (self._winner_comm, *self._others.values()):
            self._free(comm)
        self._others = {}
        self._winner, self._winner_comm = self._variants[0], self._comm

    def _comm_for(self, variant: Variant) -> MPI.Intracomm:
        """Return a communicator with the variant's settings, if communicators keep them."""
        if self._per_call or not variant.settings:
            return self._comm
        with mpi_t.settings(variant.settings):
            made = self._comm.Dup()
        made.Set_name(variant.name)
        return made

    def _settings_for(self, variant: Variant) -> AbstractContextManager[None]:
        """Return the context in which the variant must be called."""
        return mpi_t.settings(variant.settings if self._per_call else {})

    def _free(self, comm: MPI.Intracomm) -> None:
        if comm is not self._comm:
            comm.Free()

    def _measure(
        self, variant: Variant, comm: MPI.Intracomm, call: Callable[[MPI.Intracomm], float], rounds: int
    ) -> float:
        """Return the seconds of the best round; a hopeless first round is the only one."""
        best = float("inf")
        limit = max(MIN_HOPELESS_SECONDS, HOPELESS * min(self.times.values(), default=best))
        for _ in range(rounds):
            with self._settings_for(variant):
                seconds = call(comm)
            best = min(best, *agree_max(self._comm, [seconds]))
            if best > limit:
                break
        return best


def agree_max(comm: MPI.Intracomm, numbers: Sequence[float]) -> list[float]:
    """Return the largest of each number on any rank: collective."""
    largest = np.array(numbers, np.float64)
    comm.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
    return [float(number) for number in largest]
