"""Chooses for a call: its codec, its schedule, the size of its chunks, or MPI's own."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from mpi_gpucomp._call.staging import can_do
from mpi_gpucomp._dispatch.plan import Choice
from mpi_gpucomp._tuning.measure import METHODS
from mpi_gpucomp._tuning.model import DEFAULT_CHUNK, default_algorithm
from mpi_gpucomp._tuning.tuner import OWN
from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.codec.auto import Auto
from mpi_gpucomp.errors import BufferSpecError, ScheduleError, SpecError
from mpi_gpucomp.schedule import msccl_xml as xml
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.schedule.cost import default_chunk_bytes
from mpi_gpucomp.schedule.ir import Algorithm
from mpi_gpucomp.schedule.library import ScheduleLibrary
from mpi_gpucomp.schedule.verify import checked

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp._call.calls import Form
    from mpi_gpucomp._dispatch.plan import CallOptions, Settings
    from mpi_gpucomp._dispatch.runtime import Nodes
    from mpi_gpucomp._tuning.tuner import Decision, Tuner
    from mpi_gpucomp.codec import Codec

__all__ = ["Chooser", "Planned"]


class Chooser:
    """The choices of one communicator; all ranks come to the same, from what all of them know."""

    def __init__(
        self, rank: int, nodes: Nodes, settings: Settings, tuner: Tuner, meet: Callable[[str, str], None]
    ) -> None:
        """Choose for one rank of those on all nodes. `meet` lets all compare what they say of a method, or raises."""
        self._rank, self._nodes, self._settings, self._tuner, self._meet = rank, nodes, settings, tuner, meet
        self._size = sum(map(len, nodes))
        self._codecs = {role: get_codec(codec) for role, codec in {**settings.roles, "": settings.codec}.items()}

    def choose(self, method: str, form: Form | None, options: CallOptions, *, blocking: bool) -> Choice:
        """Choose; a call that may not wait for others takes what is known."""
        name, wanted = options.get("name"), options.get("algorithm")
        if form is None or form.collective == "scan":
            self._check_mpi_can(method, form, options)
            return Choice(None, None)
        codec = self._codec(form, options)
        free = name is None and wanted is None and not self._settings.rails
        if free and self.is_small(form, codec):
            return Choice(codec, None)
        chunk, trial = options.get("chunk") or self._settings.chunk or self._usual_chunk(form, codec), None
        if isinstance(codec, Auto):
            codec = self._tuner.codec
            if free and form.counts is not None and can_do(form):
                decision = self._decide(method, form, blocking=blocking)
                codec, wanted = decision.codec, decision.algorithm
                # The model does not know what else a chunk costs that is encoded.
                best = decision.chunk if codec.name == "none" else self._usual_chunk(form, codec)
                chunk = options.get("chunk") or self._settings.chunk or best
                if wanted is None:
                    on, trial, lasting = decision.on, decision.trial, decision.lasting
                    return Choice(self._tuner.codec, None, on=on, trial=trial, lasting=lasting)
                trial = decision.trial
        piece = max(1, chunk // form.some.buffer.dtype.itemsize)
        return Choice(codec, self._algorithm(form, wanted), piece, trial=trial)

    def _decide(self, method: str, form: Form, *, blocking: bool) -> Decision:
        """Let `auto` decide; the first time it measures, once all ranks have said that they want the same."""
        if not self._tuner.knows(form.collective):
            if not blocking:
                return OWN
            self._meet(method, f"{form.said}, auto")
            self._tuner.measure(form.collective, form.some.buffer.device)
        return self._tuner.decide(form, form.nbytes, blocking=blocking)

    def calibrate(self, methods: tuple[str, ...]) -> None:
        """Measure what these methods need to be known for `auto`: all ranks do, together."""
        for wanted in methods:
            bare = _bare(wanted)
            collective = next((name for name, (method, _) in METHODS.items() if _bare(method) == bare), None)
            if collective is None:
                raise SpecError(
                    "calibrate",
                    expected=f"some of {', '.join(method for method, _ in METHODS.values())}",
                    got=repr(wanted),
                    remedy="Name the methods that will be called.",
                    rank=self._rank,
                )
            if not self._tuner.knows(collective):
                self._meet("calibrate", collective)
                self._tuner.measure(collective, "host")

    def _check_mpi_can(self, method: str, form: Form | None, options: CallOptions) -> None:
        """Raise where the caller asks for more than MPI can do."""
        if form is not None and not can_do(form):
            raise BufferSpecError(
                method,
                expected="elements of a type that MPI has operations for",
                got=str(form.some.buffer.dtype),
                remedy="Convert them to float32 first.",
                rank=self._rank,
            )
        asked = [key for key in ("name", "algorithm", "codec") if options.get(key) is not None]
        if asked:
            raise SpecError(
                method,
                expected=f"elements and an operation that can go with {', '.join(asked)}",
                got="a collective, a derived datatype, an operation or elements that only MPI knows",
                remedy=f"Leave {', '.join(asked)} out.",
                rank=self._rank,
            )

    def _codec(self, form: Form, options: CallOptions) -> Codec:
        """Return the codec of a call; the communicator's own stands back where it cannot hold the elements."""
        dtype = form.some.buffer.dtype
        explicit = options.get("codec")
        if explicit is not None:
            codec = get_codec(explicit)
            codec.check_dtype(dtype)
            return codec
        role = options.get("role") or ""
        if role not in self._codecs:
            known = ", ".join(sorted(filter(None, self._codecs)))
            raise SpecError(
                "role",
                expected=f"one of {known}" if known else "none: the communicator has no roles",
                got=repr(role),
                remedy="Give the communicator a codec for it: Communicator(..., roles={...}).",
                rank=self._rank,
            )
        codec = self._codecs[role]
        return codec if dtype.name in codec.dtypes else get_codec("none")

    def is_small(self, form: Form, codec: Codec | None) -> bool:
        """Say whether MPI's own is at least as fast, from what all ranks know."""
        if codec is None or not can_do(form):
            return False
        if form.counts is None:
            # Open MPI 5 gives wrong results in MPI_Ialltoallv in place where some counts are 0.
            wrong = form.collective == "alltoall" and form.in_place
            return codec.name in ("none", "auto") and not wrong
        small, chunk = self._settings.passthrough_bytes, self._settings.chunk or DEFAULT_CHUNK
        if codec.name == "auto" and self._tuner.knows(form.collective):
            return form.nbytes <= small
        # Without a codec that somebody asked for, a single chunk gains nothing from a schedule.
        return form.nbytes <= (max(small, chunk) if small and codec.name in ("none", "auto") else small)

    def _usual_chunk(self, form: Form, codec: Codec) -> int:
        """Return the bytes of a chunk where nobody has said how long it should be.

        Shorter chunks are through a chain sooner, and each takes the processor some time however short it is: far more
        with a codec than without.
        """
        if form.counts is None:
            return DEFAULT_CHUNK
        shared = len(self._nodes) == 1
        return default_chunk_bytes(form.nbytes, coded=codec.name != "none", shared=shared)

    def _algorithm(self, form: Form, wanted: str | Algorithm | None) -> Algorithm:
        """Return the schedule for a call: by its name, from a file, or as given."""
        if wanted is None:
            # Where not all ranks know how long the blocks of others are, they could not agree on more.
            known = form.counts is not None
            wanted = default_algorithm(form.collective, form.nbytes if known else 0, self._nodes)
        if isinstance(wanted, str) and not wanted.endswith(".xml"):
            return build(form.collective, wanted, self._size, form.root, self._nodes, form.in_place)
        given = checked(wanted) if isinstance(wanted, Algorithm) else _from_file(wanted)
        self._check_fits(given, form)
        return given

    def _check_fits(self, given: Algorithm, form: Form) -> None:
        # The root alone says that it works in place; to the others a schedule is the same either way.
        elsewhere = form.root != self._rank and form.collective in ("reduce", "gather", "scatter")
        wanted = form.collective, self._size, given.in_place if elsewhere else form.in_place, form.root
        got = given.collective, given.ranks, given.in_place, given.spec.root
        if wanted != got:
            kind = "{} on {} ranks, in place: {}, root {}"
            raise ScheduleError(
                f"algorithm {given.name}",
                expected=kind.format(*wanted),
                got=kind.format(*got),
                remedy="Load a schedule that was made for this call.",
                rank=self._rank,
            )


def _bare(method: str) -> str:
    """Return what the variants of a method have in common: one is measured for all."""
    return method.lower().removeprefix("i").removesuffix("v").removesuffix("_block")


@lru_cache(maxsize=64)
def _from_file(path: str) -> Algorithm:
    """Read and check a schedule once."""
    return checked(xml.read(Path(path)))


# Finds the schedule for a call in a directory of plans, where a communicator has one.

COLLECTIVES = ("broadcast", "allreduce", "allgather", "reduce_scatter", "alltoall")
"""In the others the root alone knows whether it works in place, so ranks might find different plans."""


class Planned:
    """The plans of one communicator: all ranks look in the same directory, and find the same."""

    def __init__(self, ranks: int, nodes: Nodes, settings: Settings) -> None:
        """Look for plans of ranks that lie on nodes as these do, if there are any."""
        self._small, self._ranks = settings.passthrough_bytes, ranks
        self._plans = None if settings.plans is None else ScheduleLibrary(settings.plans, nodes)

    def options(self, form: Form | None, options: CallOptions) -> CallOptions:
        """Return the options of a call with the plan that fits; as they are where none does or one was named."""
        if self._plans is None or form is None or form.counts is None or options.get("algorithm") is not None:
            return options
        nbytes = sum(form.counts) * form.some.buffer.dtype.itemsize
        if form.collective not in COLLECTIVES or nbytes <= self._small:
            return options
        plan = self._plans.find(form.collective, self._ranks, nbytes, form.root, in_place=form.in_place)
        return options if plan is None else {**options, "algorithm": plan}
