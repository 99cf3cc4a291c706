"""The policy: an ordered list of rules from a `Call` to a `Plan`. The first rule that answers wins."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from mpi_gpucomp._call.staging import mpi_reaches_gpu, mpi_supports, wait_for_producers
from mpi_gpucomp._dispatch.plan import Lifetime, Plan, Route
from mpi_gpucomp._tuning.model import DEFAULT_CHUNK, default_algorithm
from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.codec.auto import Auto
from mpi_gpucomp.errors import BufferSpecError, ScheduleError, SpecError
from mpi_gpucomp.schedule import msccl_xml
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.schedule.cost import default_chunk_bytes
from mpi_gpucomp.schedule.ir import COLLECTIVES, Algorithm
from mpi_gpucomp.schedule.msccl_xml import ScheduleLibrary
from mpi_gpucomp.schedule.verify import checked
from mpi_gpucomp.transport.selection import MPI_WIRE

if TYPE_CHECKING:
    from collections.abc import Hashable

    from mpi_gpucomp._call.calls import Call
    from mpi_gpucomp._dispatch.plan import Settings
    from mpi_gpucomp._dispatch.runtime import Runtime
    from mpi_gpucomp._tuning.tuner import Tuner
    from mpi_gpucomp.codec import Codec

__all__ = ["Policy"]

MAX_PLANS = 256
MPI_COUNT = (1 << 31) - 1
"""The largest count and displacement that MPI libraries before MPI 4 take."""
SINGLE_CHUNK = 1 << 19
"""Bytes up to which the engine gains nothing over the MPI library without a codec, if it has a faster wire."""


class Policy:
    """Plans the calls of one communicator, from what all ranks know, so that all make the same plan."""

    def __init__(self, runtime: Runtime, settings: Settings, tuner: Tuner) -> None:
        """Plan for this rank of a runtime."""
        self._rank, self._size, self._nodes = runtime.rank, runtime.size, runtime.nodes
        self._on_gpus, self._settings, self._tuner = runtime.on_gpus, settings, tuner
        self._codecs = {role: get_codec(codec) for role, codec in {**settings.roles, "": settings.codec}.items()}
        self._library = None if settings.plans is None else ScheduleLibrary(settings.plans, self._nodes)
        self._wire = runtime.wire
        self._rules = (self._native_only, self._explicit, self._from_library, self._small)
        self._plans: dict[Hashable, Plan] = {}
        """Plans of the engine that the tuner has no part in, by `Call.plan_key`."""

    def plan(self, call: Call, *, explore: bool = True) -> Plan:
        """Return the plan of the first rule that applies; without `explore`, the tuner races no candidates."""
        key = call.plan_key
        known = self._plans.get(key)
        if known is not None:
            return known
        plan = self._plan(call, explore=explore)
        if key is not None and plan.route is Route.ENGINE and not isinstance(self._codec(call), Auto):
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _plan(self, call: Call, *, explore: bool) -> Plan:
        for rule in self._rules:
            plan = rule(call)
            if plan is not None:
                return plan
        return self._by_codec(call, explore=explore)

    # Rules

    def _native_only(self, call: Call) -> Plan | None:
        """Pass through what only the MPI library can run: derived datatypes, other operations, Scan and Exscan."""
        if call.unsupported is None and call.collective != "scan":
            return None
        reason = call.unsupported or f"{call.method} has no schedule"
        if call.unsupported is None and not mpi_supports(call):
            raise BufferSpecError(
                call.method,
                expected="elements of a type that MPI has operations for",
                got=str(call.blocks.buffer.dtype),
                remedy="Convert them to float32 first.",
                rank=self._rank,
            )
        asked = [key for key in ("name", "algorithm", "codec") if call.options.get(key) is not None]
        if asked:
            raise SpecError(
                call.method,
                expected=f"a call that the engine can run, as {' and '.join(f'{key}=' for key in asked)} requires",
                got=reason,
                remedy=f"Pass an array of a basic type and one of SUM, PROD, MIN, MAX, or omit {', '.join(asked)}.",
                rank=self._rank,
            )
        if call.unsupported is None:
            self._check_counts(call)
        else:
            reaches_gpu = mpi_reaches_gpu(blocking=call.blocking)
            wait_for_producers(call.title, call.args, reaches_gpu=reaches_gpu, rank=self._rank)
        return Plan(Route.PASSTHROUGH, f"only the MPI library supports this call: {reason}")

    def _explicit(self, call: Call) -> Plan | None:
        """Run named calls, calls with an algorithm, and all calls on rails, which native MPI does not use."""
        options = call.options
        name, algorithm = options.get("name"), options.get("algorithm")
        if name is None and algorithm is None and not self._settings.rails:
            return None
        why = "algorithm= was given" if algorithm is not None else "the call has a name" if name else "rails are in use"
        if algorithm is None and (found := self._library_schedule(call)) is not None:
            algorithm, why = found, f"{why}; the schedule library has a schedule for it"
        return self._engine(call, self._codec(call), algorithm, why)

    def _from_library(self, call: Call) -> Plan | None:
        """Run a schedule of the schedule library, if it has one."""
        found = self._library_schedule(call)
        if found is None:
            return None
        return self._engine(call, self._codec(call), found, "the schedule library has a schedule for it")

    def _small(self, call: Call) -> Plan | None:
        """Pass through messages so small that native MPI is at least as fast."""
        codec = self._codec(call)
        if not mpi_supports(call):
            return None
        if call.counts is None:
            # Open MPI 5 returns wrong results from MPI_Ialltoallv in place where some counts are 0.
            broken = call.collective == "alltoall" and call.in_place
            if codec.name not in ("none", "auto") or broken:
                return None
            self._check_counts(call)
            why = "the ranks do not know each other's counts"
            return Plan(Route.PASSTHROUGH, why, codec, lifetime=Lifetime())
        limit = self._passthrough_limit(call, codec)
        if call.nbytes > limit:
            return None
        why = f"{call.nbytes} bytes, at most {limit} are passed through"
        return Plan(Route.PASSTHROUGH, why, codec, lifetime=Lifetime())

    def _by_codec(self, call: Call, *, explore: bool) -> Plan:
        """Run a schedule with the codec that was asked for, or follow the tuner's plan for `auto`."""
        codec = self._codec(call)
        if not isinstance(codec, Auto) or call.counts is None or not mpi_supports(call) or sum(call.counts) > MPI_COUNT:
            return self._engine(call, codec, None, f"codec {codec.spec}, and the message is not small")
        plan = self._tuner.plan(call, explore=explore)
        chunk = call.options.get("chunk") or self._settings.chunk
        return replace(plan, chunk_bytes=chunk) if chunk and plan.route is Route.ENGINE else plan

    # What rules share

    def _check_counts(self, call: Call) -> None:
        """Raise if only the MPI library may run a call, and it does not take counts as large as these."""
        blocks = [one for one in (call.sent, call.received) if one is not None]
        most = max((max(*one.counts, *one.starts, 0) for one in blocks), default=0)
        if most > MPI_COUNT:
            raise BufferSpecError(
                call.method,
                expected=f"counts and displacements of at most {MPI_COUNT}, as native MPI runs this call",
                got=str(most),
                remedy="Pass codec='split' on every rank where the call takes it, or elements of a larger type.",
                rank=self._rank,
            )

    def _passthrough_limit(self, call: Call, codec: Codec) -> int:
        limit, on_mpi = self._settings.passthrough_bytes, self._wire.kind == MPI_WIRE
        chunk = self._settings.chunk or (DEFAULT_CHUNK if on_mpi else SINGLE_CHUNK)
        if codec.name == "auto" and self._tuner.is_calibrated(call.collective):
            return limit
        # Without a codec that was asked for, a single chunk gains nothing from a schedule.
        return max(limit, chunk) if limit and codec.name in ("none", "auto") else limit

    def _engine(self, call: Call, codec: Codec, algorithm: str | Algorithm | None, why: str) -> Plan:
        if isinstance(codec, Auto):
            codec = self._tuner.codec
        chunk = call.options.get("chunk") or self._settings.chunk or self._default_chunk(call, codec)
        return Plan(Route.ENGINE, why, codec, self._schedule(call, algorithm), chunk, wire=self._wire.title)

    def _codec(self, call: Call) -> Codec:
        """Return the codec of a call; the communicator's falls back to none for types that it does not support."""
        dtype = call.blocks.buffer.dtype
        explicit = call.options.get("codec")
        if explicit is not None:
            codec = get_codec(explicit)
            codec.check_dtype(dtype)
            return codec
        role = call.options.get("role") or ""
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

    def _default_chunk(self, call: Call, codec: Codec) -> int:
        """Return the default chunk size.

        Smaller chunks fill a chain sooner, but each has a fixed cost, which is far higher with a codec.
        """
        if call.counts is None:
            return DEFAULT_CHUNK
        shared = len(self._nodes) == 1
        # A reduction cannot be forwarded before all of a chunk has arrived.
        relayed = self._wire.kind != MPI_WIRE and not COLLECTIVES[call.collective].reduces
        coded = codec.name != "none"
        return default_chunk_bytes(call.nbytes, coded=coded, shared=shared, relayed=relayed, gpu=self._on_gpus)

    def _library_schedule(self, call: Call) -> Algorithm | None:
        # Of rooted reductions, gathers and scatters only the root knows whether it works in place: the ranks might find
        # different schedules.
        known = COLLECTIVES[call.collective]
        if self._library is None or call.counts is None or (known.rooted and call.collective != "broadcast"):
            return None
        if call.nbytes <= self._settings.passthrough_bytes:
            return None
        return self._library.find(call.collective, self._size, call.nbytes, call.root, in_place=call.in_place)

    def _schedule(self, call: Call, wanted: str | Algorithm | None) -> Algorithm:
        """Return the schedule of a call: the default, by name, from a file, or as given."""
        if wanted is None:
            # Where the ranks do not know each other's counts they could not agree on a choice by size.
            wanted = default_algorithm(call.collective, call.nbytes, self._nodes)
        if isinstance(wanted, str) and not wanted.endswith(".xml"):
            return build(call.collective, wanted, self._size, call.root, self._nodes, call.in_place)
        schedule = checked(wanted) if isinstance(wanted, Algorithm) else _schedule_file(wanted)
        self._check_fits(schedule, call)
        return schedule

    def _check_fits(self, schedule: Algorithm, call: Call) -> None:
        # In these only the root passes IN_PLACE; to the other ranks a schedule is the same either way.
        elsewhere = call.root != self._rank and call.collective in ("reduce", "gather", "scatter")
        in_place = schedule.in_place if elsewhere else call.in_place
        wanted = call.collective, self._size, in_place, call.root
        got = schedule.collective, schedule.ranks, schedule.in_place, schedule.spec.root
        if wanted != got:
            kind = "{} on {} ranks, in place: {}, root {}"
            raise ScheduleError(
                f"algorithm {schedule.name}",
                expected=kind.format(*wanted),
                got=kind.format(*got),
                remedy="Load a schedule that was made for this call.",
                rank=self._rank,
            )


@lru_cache(maxsize=64)
def _schedule_file(path: str) -> Algorithm:
    """Read and check a schedule file once."""
    return checked(msccl_xml.read(Path(path)))
