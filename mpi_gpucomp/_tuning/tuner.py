"""The plans of `codec="auto"`: pass-through, or which schedule, with or without a lossless codec.

All ranks must make the same plan. They plan by numbers that they have measured and agreed on, and by the message size.
Only where the compressibility of the data would change the plan do the ranks that hold data take a sample, and agree
on the worst. Measuring is collective: the first blocking call of each collective does it, or `Communicator.calibrate`;
until then non-blocking calls are passed through.

Predictions rank the candidates; measurements decide. The first blocking calls of each size race the candidates, later
ones use the winner. Reductions are not raced unless `Communicator.autotune` asks for it, so that their summation order
stays the same from call to call.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI

from mpi_gpucomp._dispatch.plan import Lifetime, Plan, Route
from mpi_gpucomp._tuning.measure import calibrate
from mpi_gpucomp._tuning.mpi_algorithms import DEFAULT, AlgorithmSweep, agree_max, keeps_settings
from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.codec.auto import CANDIDATES, GENERAL, Auto
from mpi_gpucomp.device import get_device, order_after
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.schedule.cost import default_chunk_bytes
from mpi_gpucomp.schedule.ir import COLLECTIVES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi_gpucomp._call.calls import Call
    from mpi_gpucomp._dispatch.runtime import Runtime
    from mpi_gpucomp._tuning.measure import Calibration
    from mpi_gpucomp._tuning.model import Estimate
    from mpi_gpucomp.codec import Codec

__all__ = ["CALLS_PER_SAMPLE", "Candidate", "Race", "Tuner"]

T = TypeVar("T")

OPTIMISTIC_RATIO = 8.0
"""More than any lossless codec is expected to reach."""
TYPICAL_RATIOS = {"float16": 1.2, "bfloat16": 1.45, "float32": 1.15, "float64": 1.1}
"""Compression ratios of `split` on weights and gradients."""
CALLS_PER_SAMPLE = 16
"""How many calls a sample of the data holds for."""
PLAUSIBLE = 2.0
"""Candidates predicted to take more than this multiple of native MPI's time are not raced."""
SHORT_SECONDS = 0.02
"""Calls below this duration are raced for more rounds: they cost little, and vary more."""
MAX_RACES = 64
"""Call classes that are raced; the model plans those beyond."""
KEEP_RATIOS = (3.0, 1.5, 1.25, 1.2, 1.15, 1.1, 1.1)
KEEP_RATIOS_SHORT = (4.0, 3.0, 2.0, 1.5, 1.3, 1.2, 1.15, 1.1, 1.1)
"""After each round, candidates within this multiple of the least cost stay in; one more round decides."""
RAW = get_codec("none")


class Candidate(NamedTuple):
    """A way to run calls of one class, whatever their root."""

    algorithm: str | None
    """The name of a schedule; None for native MPI."""
    chunk_bytes: int = 0
    codec: Codec = RAW
    comm: MPI.Intracomm | None = None
    """The communicator to pass calls through on; None for the default."""


NATIVE = Candidate(None)


class Race(Generic[T]):
    """Finds the fastest of several candidates by rotating calls through them; in step on all ranks."""

    def __init__(self, candidates: Sequence[T], *, short: bool = False) -> None:
        """Start with the candidate that is expected to win; `short` calls are raced for more rounds."""
        self._ratios = KEEP_RATIOS_SHORT if short else KEEP_RATIOS
        self._candidates, self._running = tuple(candidates), list(range(len(candidates)))
        self._costs: list[list[float]] = [[] for _ in candidates]
        self._round_costs: list[float] = []
        self._round = 0

    @property
    def decided(self) -> bool:
        """Return True if one candidate is left."""
        return len(self._running) == 1

    @property
    def current(self) -> T:
        """Return the candidate to use now."""
        return self._candidates[self._running[0 if self.decided else len(self._round_costs)]]

    @property
    def position(self) -> str:
        """Describe the state of the race, for ranks to compare."""
        return f"race round {self._round}, candidate {len(self._round_costs)}"

    def advance(self, agree_max: Callable[[list[float]], list[float]]) -> None:
        """End a complete round: drop slow candidates. `agree_max` returns the largest of each number on any rank."""
        if len(self._round_costs) < len(self._running) or self.decided:
            return
        for candidate, cost in zip(self._running, agree_max(self._round_costs), strict=True):
            self._costs[candidate].append(cost)
        # The first round may include the setup of connections.
        costs = {candidate: median(self._costs[candidate][1:] or self._costs[candidate]) for candidate in self._running}
        best = min(self._running, key=costs.__getitem__)
        ratio = self._ratios[self._round] if self._round < len(self._ratios) else 0.0
        self._running = [one for one in self._running if one == best or costs[one] <= ratio * costs[best]]
        self._round_costs, self._round = [], self._round + 1

    def record(self, cost: float) -> None:
        """Record what the current candidate has cost this rank."""
        if not self.decided:
            self._round_costs.append(cost)


class _DataSample(NamedTuple):
    """The codec that suits some data best, and its compression ratio."""

    codec: str
    ratio: float


_NO_SAMPLE = _DataSample("none", 1.0)


class Tuner:
    """Plans the calls of one communicator for which `auto` may choose."""

    def __init__(self, runtime: Runtime) -> None:
        """Measure and agree through `runtime`."""
        self._runtime, self._comm = runtime, runtime.comm
        self._calibrations: dict[str, Calibration] = {}
        self._sweeps: list[AlgorithmSweep] = []
        self._samples: dict[tuple[str, int, str], tuple[Lifetime, _DataSample]] = {}
        self._races: dict[tuple[str, int, str, str], Race[Candidate]] = {}
        self.codec = Auto()
        """The codec that chooses per chunk, for schedules that were not chosen here."""
        self.racing_reductions = False
        """True while `autotune` runs, when reductions may be raced too."""

    def close(self) -> None:
        """Free the communicators made for sweeps: collective."""
        for sweep in self._sweeps:
            sweep.close()

    # Calibration

    def is_calibrated(self, collective: str) -> bool:
        """Return True if a collective has been measured."""
        return collective in self._calibrations

    def misses_gpus(self, collective: str, device: str) -> bool:
        """Return True if a collective was measured before any rank used a GPU, and one does now: all ranks ask."""
        has_gpu = max(agree_max(self._comm, [float(device != "host")]))
        return has_gpu > 0 and self._calibrations[collective].gpu_costs is None

    def calibrate(self, collective: str, device: str) -> None:
        """Measure a collective: all ranks do, with nothing else in flight."""
        known = next(reversed(self._calibrations.values()), None)
        sweep = self._new_sweep if keeps_settings() else None
        found = calibrate(self._runtime, collective, device, known, sweep)
        self._calibrations[collective] = found
        if known is None or known.gpu_costs is not found.gpu_costs:
            self.codec = Auto(found.costs, found.gpu_costs)
        for tuned in found.tuned_comms:
            self._runtime.native.add_tuned_comm(COLLECTIVES[collective].method, tuned)
        self._runtime.native.fast_path.clear()  # calls that bypassed dispatch may find a better plan now

    def _new_sweep(self, collective: str) -> AlgorithmSweep:
        self._sweeps.append(AlgorithmSweep(self._comm, COLLECTIVES[collective].method.lower()))
        return self._sweeps[-1]

    # Plans

    def plan(self, call: Call, *, explore: bool = True) -> Plan:
        """Plan a call whose counts all ranks know; a blocking one may measure, sample and, to `explore`, race."""
        if not self.is_calibrated(call.collective):
            if not call.blocking:
                return Plan(Route.PASSTHROUGH, "auto, not calibrated yet: a non-blocking call may not wait for that")
            self._runtime.agree(call.title, f"{call.signature}, auto")
            self.calibrate(call.collective, call.blocks.buffer.device)
        return self._plan_blocking(call, explore) if call.blocking else self._plan_nonblocking(call)

    def observe(self, plan: Plan, call: Call, seconds: float) -> None:
        """Record how long a call took that was a sample of a race."""
        if plan.race is not None:
            plan.race.record(seconds / call.nbytes)

    def _plan_blocking(self, call: Call, explore: bool) -> Plan:
        known, dtype = self._calibrations[call.collective], call.blocks.buffer.dtype
        may_pay = any(known.best(call.nbytes, dtype, name, OPTIMISTIC_RATIO).encoded for name in _codec_names(call))
        lifetime, sample = self._recent_sample(call) if may_pay else (Lifetime(), _NO_SAMPLE)
        expected = _candidate(known.best(call.nbytes, dtype, *sample), sample)
        candidate, race, why = self._race(call, expected, sample, explore)
        return self._made(call, candidate, why, race, lifetime if race is None else None)

    def _plan_nonblocking(self, call: Call) -> Plan:
        """Plan by the typical compressibility of such data: a non-blocking call neither samples nor races."""
        known, dtype = self._calibrations[call.collective], call.blocks.buffer.dtype
        raw = known.best(call.nbytes, dtype)
        if raw.algorithm is None:
            return self._made(call, NATIVE, "auto, predicted by the model")
        # Each chunk decides for itself whether it is encoded; a reduction waits for that, so it must be likely to pay.
        reduces = COLLECTIVES[call.collective].reduces
        ratio = TYPICAL_RATIOS.get(dtype.name, 1.0) if reduces else OPTIMISTIC_RATIO
        encoded = any(known.best(call.nbytes, dtype, name, ratio).encoded for name in _codec_names(call))
        candidate = Candidate(raw.algorithm, raw.chunk_bytes, self.codec if encoded else RAW)
        return self._made(call, candidate, "auto, predicted by the model")

    def _made(
        self,
        call: Call,
        candidate: Candidate,
        why: str,
        race: Race[Candidate] | None = None,
        lifetime: Lifetime | None = None,
    ) -> Plan:
        if candidate.algorithm is None:
            return Plan(Route.PASSTHROUGH, why, self.codec, comm=candidate.comm, race=race, lifetime=lifetime)
        nodes = self._runtime.nodes
        algorithm = build(call.collective, candidate.algorithm, self._comm.size, call.root, nodes, call.in_place)
        chunk, codec = candidate.chunk_bytes, candidate.codec
        if codec.name != "none":
            # The model does not know the fixed cost of an encoded chunk.
            on_gpus = self._runtime.on_gpus
            chunk = default_chunk_bytes(call.nbytes, coded=True, shared=len(nodes) == 1, gpu=on_gpus)
            if self._calibrations[call.collective].gpu_costs is not None:
                codec = self.codec  # ranks may have their elements elsewhere: each decides for its chunks
        return Plan(Route.ENGINE, why, codec, algorithm, chunk, race=race)

    # Races

    def _race(
        self, call: Call, expected: Candidate, sample: _DataSample, explore: bool
    ) -> tuple[Candidate, Race[Candidate] | None, str]:
        """Return the winner for calls of this class, or the candidate to measure next and its race."""
        key = call.collective, call.nbytes.bit_length(), call.blocks.buffer.dtype.name, sample.codec
        race = self._races.get(key)
        if race is not None and race.decided:
            return race.current, None, "auto, the fastest candidate measured for this size"
        fixed_order = COLLECTIVES[call.collective].reduces and not self.racing_reductions
        if not explore or fixed_order or (race is None and len(self._races) == MAX_RACES):
            return expected, None, "auto, predicted by the model"
        self._runtime.agree(call.title, f"{call.signature}, auto, {race.position if race else 'race'}")
        if race is None:
            short = self._calibrations[call.collective].native_seconds(call.nbytes) < SHORT_SECONDS
            race = self._races[key] = Race(self._candidates(call, expected, sample), short=short)
        race.advance(partial(agree_max, self._comm))
        self._comm.Barrier()  # the wait for a late rank must not count
        if race.decided:
            return race.current, None, "auto, the fastest candidate measured for this size"
        return race.current, race, f"auto, exploring: {race.position}"

    def _candidates(self, call: Call, expected: Candidate, sample: _DataSample) -> list[Candidate]:
        """Return the candidates worth a race, the expected winner first."""
        known, dtype = self._calibrations[call.collective], call.blocks.buffer.dtype
        limit = PLAUSIBLE * known.native_seconds(call.nbytes)
        engine = known.best_engine(call.nbytes, dtype), known.best_engine(call.nbytes, dtype, *sample)
        found = [expected, NATIVE, *(_candidate(one, sample) for one in engine if one.seconds <= limit)]
        usual = next((tuned.comm for tuned in known.tuned_comms if tuned.covers(call.nbytes)), self._comm)
        found += [Candidate(None, comm=comm) for comm in self._native_comms(call.collective) if comm is not usual]
        distinct: dict[object, Candidate] = {}
        for one in found:
            distinct.setdefault((one.algorithm, one.chunk_bytes, one.codec.spec, one.comm and one.comm.handle), one)
        return list(distinct.values())

    def _native_comms(self, collective: str) -> list[MPI.Intracomm]:
        """Return the communicators on which native MPI may be fast."""
        found = {DEFAULT: self._comm}
        for sweep in self._sweeps:
            if sweep.collective == COLLECTIVES[collective].method.lower():
                found |= sweep.promising(found)
        self._runtime.native.derived_comms.extend(found.values())
        return list(found.values())

    # Samples

    def _recent_sample(self, call: Call) -> tuple[Lifetime, _DataSample]:
        """Return the last sample of such data and how long it holds; agreeing on one costs as much as a short call."""
        key = call.collective, call.nbytes.bit_length(), call.blocks.buffer.dtype.name
        lifetime, sample = self._samples.get(key, (Lifetime(0), _NO_SAMPLE))
        if not lifetime.ttl:
            self._runtime.agree(call.title, f"{call.signature}, auto, sampling")
            # A new lifetime: plans that hold the old one have expired.
            lifetime, sample = self._samples[key] = Lifetime(CALLS_PER_SAMPLE), self._agree_sample(call)
        lifetime.ttl -= 1
        return lifetime, sample

    def _agree_sample(self, call: Call) -> _DataSample:
        """Agree on a codec and its ratio: the worst of all ranks that hold data."""
        names = _codec_names(call)
        numbers = np.full(2, np.inf)
        from_root = call.collective in ("broadcast", "scatter")
        if call.sent is not None and (not from_root or self._comm.rank == call.root):
            sample = self._take_sample(call)
            numbers[:] = round(sample.ratio, 2), names.index(sample.codec) if sample.codec in names else -1.0
        self._comm.Allreduce(MPI.IN_PLACE, numbers, MPI.MIN)
        ratio, number = numbers
        return _DataSample(names[int(number)], float(ratio)) if np.isfinite(ratio) and number >= 0 else _NO_SAMPLE

    def _take_sample(self, call: Call) -> _DataSample:
        """Sample this rank's data, if contiguous."""
        assert call.sent is not None
        buffer = call.sent.buffer
        if not buffer.contiguous:
            return _NO_SAMPLE
        stream = get_device(buffer.device).stream()
        order_after(buffer, stream)
        found = self.codec.sample(buffer, stream).result()
        stream.close()
        return _DataSample(found.codec.name, found.ratio)


def _codec_names(call: Call) -> list[str]:
    return [codec.name for codec in CANDIDATES.get(call.blocks.buffer.dtype.name, GENERAL)]


def _candidate(estimate: Estimate, sample: _DataSample) -> Candidate:
    if estimate.algorithm is None:
        return NATIVE
    return Candidate(estimate.algorithm, estimate.chunk_bytes, get_codec(sample.codec) if estimate.encoded else RAW)
