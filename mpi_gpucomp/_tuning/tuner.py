"""What `codec="auto"` does with a message: MPI's own collective, or which schedule, and whether it is encoded.

All ranks must decide alike. So they decide by numbers that they have measured and agreed on together, and by the length
of the message. Only where its compressibility would tip the scale does each rank that has data take a sample, and they
agree on the worst. Measuring takes all ranks, so it is done by the first blocking call of each collective, or by
`Communicator.tune`; until then a call that is only started is MPI's own.

No model is as good as the thing itself: the first blocking calls of a kind take the ways that may be the fastest in
turns, and later ones the one that was. Those that add up do so only when asked to settle: what a sum is should not
depend on which call made it.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI

from mpi_gpucomp._dispatch.plan import Calls
from mpi_gpucomp._tuning.measure import METHODS, arguments, calibrate
from mpi_gpucomp._tuning.mpi_algorithms import DEFAULT, Tuned, keeps_settings
from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.codec.auto import CANDIDATES, GENERAL, Auto
from mpi_gpucomp.device import get_device, order_after
from mpi_gpucomp.schedule.algorithms import algorithms
from mpi_gpucomp.schedule.ir import COLLECTIVES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mpi_gpucomp._call.calls import Form
    from mpi_gpucomp._dispatch.runtime import Nodes
    from mpi_gpucomp._tuning.measure import Calibration
    from mpi_gpucomp._tuning.model import Choice
    from mpi_gpucomp._tuning.mpi_algorithms import Better
    from mpi_gpucomp.codec import Codec

__all__ = ["EVER", "OWN", "Decision", "Trial", "Tuner"]


# Finds the fastest of several ways by taking them in turns, in calls that have to be made anyway.

Way = TypeVar("Way")

KEPT = (3.0, 1.5, 1.25, 1.2, 1.15, 1.1, 1.1)
KEPT_LONGER = (4.0, 3.0, 2.0, 1.5, 1.3, 1.2, 1.15, 1.1, 1.1)
"""How many times the least cost a way may have after each round to be tried again; after one more the best is taken.

Calls that are short cost little to try, and differ more from one time to the next.
"""


class Trial(Generic[Way]):
    """The ways of one kind of call; all ranks have the same, in the same order, and make the same calls."""

    def __init__(self, ways: Sequence[Way], *, short: bool = False) -> None:
        """Begin with the way that is expected to be the best; calls that are `short` are tried more often."""
        self._kept = KEPT_LONGER if short else KEPT
        self._ways, self._left = tuple(ways), list(range(len(ways)))
        self._costs: list[list[float]] = [[] for _ in ways]
        self._noted: list[float] = []
        self._round = 0

    @property
    def settled(self) -> bool:
        """Say whether the best way is known."""
        return len(self._left) == 1

    @property
    def way(self) -> Way:
        """The way to take now."""
        return self._ways[self._left[0 if self.settled else len(self._noted)]]

    @property
    def place(self) -> str:
        """Where it stands, for ranks to compare."""
        return f"try {len(self._noted)} of round {self._round}"

    def begin(self, agreed: Callable[[list[float]], list[float]]) -> None:
        """Look back if a round is over: `agreed` returns the largest of each number among the ranks."""
        if len(self._noted) < len(self._left) or self.settled:
            return
        for way, cost in zip(self._left, agreed(self._noted), strict=True):
            self._costs[way].append(cost)
        costs = {way: _usual(self._costs[way]) for way in self._left}
        least = min(self._left, key=costs.__getitem__)
        kept = self._kept[self._round] if self._round < len(self._kept) else 0.0
        self._left = [way for way in self._left if way == least or costs[way] <= kept * costs[least]]
        self._noted, self._round = [], self._round + 1

    def note(self, cost: float) -> None:
        """Take down what the call has cost this rank."""
        if not self.settled:
            self._noted.append(cost)


def _usual(costs: list[float]) -> float:
    """Return what a way usually costs; in its first round it may have had connections to make."""
    return median(costs[1:] or costs)


OPTIMISTIC = 8.0
"""A ratio beyond what to hope for."""
TYPICAL = {"float16": 1.2, "bfloat16": 1.45, "float32": 1.15, "float64": 1.1}
"""Ratios of `split` on weights and gradients."""
CALLS_PER_SAMPLE, EVER = 16, 1 << 62
"""How many calls a sample holds for, and what needs none."""
PLAUSIBLE = 2.0
"""How many times as long as MPI's own a way may be expected to take, to be tried."""
SHORT = 0.02
"""Seconds up to which a call is short, and is tried more often."""
MOST_TRIALS = 64
"""Kinds of calls for which ways are tried; what comes after them is left to the model."""
PLAIN = get_codec("none")


class Decision(NamedTuple):
    """What to do; no algorithm: MPI's own."""

    algorithm: str | None
    chunk: int = 0
    codec: Codec = PLAIN
    on: MPI.Intracomm | None = None
    """Where MPI's own is called, if not where its length suggests."""
    trial: Trial[Any] | None = None
    """What wants to know how long it has taken."""
    lasting: Calls | None = None
    """How many that follow are decided alike, whatever is in them."""


OWN = Decision(None)


class Sample(NamedTuple):
    """The codec that suits some data best, and its ratio."""

    codec: str
    ratio: float


UNSEEN = Sample("none", 1.0)


class Tuner:
    """The decisions of one communicator."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        nodes: Nodes,
        run: Callable[[str, tuple[object, ...], str], object],
        improve: Callable[[str, Better], None],
        meet: Callable[[str, str], None],
        adopt: Callable[[Iterable[MPI.Intracomm]], None],
    ) -> None:
        """Measure on `comm`, whose ranks lie on `nodes`.

        `run` carries out a method on buffers by an algorithm of the engine's, with no codec. `improve` hears of a
        communicator on which one of MPI's own methods is faster. `meet` lets all ranks compare what they say of a
        method, or raises. `adopt` hears of further communicators on which methods may be called.
        """
        self._comm, self._run, self._improve, self._meet, self._adopt = comm, run, improve, meet, adopt
        self._nodes = nodes
        self._known: dict[str, Calibration] = {}
        self._tuned: list[Tuned] = []
        self._samples: dict[tuple[str, int, str], tuple[Calls, Sample]] = {}
        self._trials: dict[tuple[str, int, str, str], Trial[Decision]] = {}
        self.codec = Auto()
        self.settling = False
        """Whether calls are made to find the fastest way, and nobody needs their results."""

    def knows(self, collective: str) -> bool:
        """Say whether a collective was measured."""
        return collective in self._known

    def measure(self, collective: str, device: str) -> None:
        """Measure a collective: all ranks do, and nothing else meanwhile."""
        before, method = next(iter(self._known.values()), None), METHODS[collective][0]
        tuned = partial(self._tune, method) if keeps_settings() else None
        run = partial(self._try, collective)
        found = calibrate(self._comm, collective, run, device, before, tuned, self._nodes)
        self._known[collective] = found
        if before is None:
            self.codec = Auto(found.costs)
        for better in found.better:
            self._improve(method, better)

    def _tune(self, method: str) -> Tuned:
        self._tuned.append(Tuned(self._comm, method.lower()))
        return self._tuned[-1]

    def close(self) -> None:
        """Free what was made to measure: all ranks do."""
        for tuned in self._tuned:
            tuned.close()

    def _try(self, collective: str, nbytes: int) -> None:
        """Run a collective through the engine, on buffers of which the longest has so many bytes."""
        buffers = arguments(collective, self._comm.size, nbytes)
        self._run(METHODS[collective][0], buffers, algorithms(collective)[0].name)

    def decide(self, form: Form, nbytes: int, *, blocking: bool) -> Decision:
        """Decide for a message of so many bytes; a call that may not wait takes no samples and tries nothing."""
        if not blocking:
            return self._by_habit(form, nbytes)
        known, dtype = self._known[form.collective], form.some.buffer.dtype
        may_pay = any(known.choose(nbytes, dtype, name, OPTIMISTIC).encoded for name in _candidates(form))
        calls, sample = self._recent(form, nbytes) if may_pay else (Calls(EVER), UNSEEN)
        expected = _decision(known.choose(nbytes, dtype, *sample), sample)
        decision = self._tried(form, nbytes, expected, sample)
        return decision._replace(lasting=calls if decision.trial is None else None)

    def _by_habit(self, form: Form, nbytes: int) -> Decision:
        """Decide by what such data usually are."""
        known, dtype = self._known[form.collective], form.some.buffer.dtype
        raw = known.choose(nbytes, dtype)
        if raw.algorithm is None:
            return OWN
        # Whether a chunk is encoded is decided by what is in it; a sum waits for that, so there it must be likely.
        ratio = TYPICAL.get(dtype.name, 1.0) if COLLECTIVES[form.collective].reduces else OPTIMISTIC
        encoded = any(known.choose(nbytes, dtype, name, ratio).encoded for name in _candidates(form))
        return Decision(raw.algorithm, raw.chunk, self.codec if encoded else PLAIN)

    # Trials

    def _tried(self, form: Form, nbytes: int, expected: Decision, sample: Sample) -> Decision:
        """Return the way that was the fastest for such messages, or the one whose turn it is to be tried."""
        kind = form.collective, nbytes.bit_length(), form.some.buffer.dtype.name, sample.codec
        trial = self._trials.get(kind)
        if trial is not None and trial.settled:
            return trial.way
        by_model = COLLECTIVES[form.collective].reduces and not self.settling
        if by_model or (trial is None and len(self._trials) == MOST_TRIALS):
            return expected
        self._gather(form, trial.place if trial else "first try")
        if trial is None:
            short = self._known[form.collective].own_seconds(nbytes) < SHORT
            trial = self._trials[kind] = Trial(self._ways(form, nbytes, expected, sample), short=short)
        trial.begin(self._largest)
        self._comm.Barrier()  # to wait for a rank that is late should not count
        return trial.way if trial.settled else trial.way._replace(trial=trial)

    def _ways(self, form: Form, nbytes: int, expected: Decision, sample: Sample) -> list[Decision]:
        """Return the ways that may be the fastest, the expected one first."""
        known, dtype = self._known[form.collective], form.some.buffer.dtype
        limit = PLAUSIBLE * known.own_seconds(nbytes)
        engine = known.engine(nbytes, dtype), known.engine(nbytes, dtype, *sample)
        ways = [expected, OWN, *(_decision(choice, sample) for choice in engine if choice.seconds <= limit)]
        usual = next((better.comm for better in known.better if better.suits(nbytes)), self._comm)
        ways += [Decision(None, on=comm) for comm in self._own(form.collective) if comm is not usual]
        return _distinct(ways)

    def _own(self, collective: str) -> list[MPI.Intracomm]:
        """Return where MPI's own may be fast."""
        found = {DEFAULT: self._comm}
        for tuned in self._tuned:
            if tuned.collective == METHODS[collective][0].lower():
                found |= tuned.promising(found)
        self._adopt(found.values())
        return list(found.values())

    def _gather(self, form: Form, what: str) -> None:
        """Wait for all ranks, so that those which do something else are noticed here, and not inside MPI."""
        self._meet(METHODS[form.collective][0], f"{form.said}, auto, {what}")

    def _largest(self, numbers: list[float]) -> list[float]:
        largest = np.array(numbers, np.float64)
        self._comm.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
        return [float(number) for number in largest]

    # Samples

    def _recent(self, form: Form, nbytes: int) -> tuple[Calls, Sample]:
        """Return what a sample of this message or of one before it, of its kind, has shown, and how long that holds.

        To agree on a sample takes as long as a short message. A chunk that does not shrink travels as it is anyway.
        """
        kind = form.collective, nbytes.bit_length(), form.some.buffer.dtype.name
        calls, sample = self._samples.get(kind, (Calls(0), UNSEEN))
        if not calls.left:
            self._gather(form, "a sample")
            # A new count: whoever holds the old one holds a choice that is over.
            calls, sample = self._samples[kind] = Calls(CALLS_PER_SAMPLE), self._sampled(form)
        calls.left -= 1
        return calls, sample

    def _sampled(self, form: Form) -> Sample:
        """Agree on a codec and its ratio: the worst of all ranks that have data."""
        names = _candidates(form)
        numbers = np.full(2, np.inf)
        from_root = form.collective in ("broadcast", "scatter")
        if form.sent is not None and (not from_root or self._comm.rank == form.root):
            sample = self._own_sample(form)
            numbers[:] = round(sample.ratio, 2), names.index(sample.codec) if sample.codec in names else -1.0
        self._comm.Allreduce(MPI.IN_PLACE, numbers, MPI.MIN)
        ratio, number = numbers
        return Sample(names[int(number)], float(ratio)) if np.isfinite(ratio) and number >= 0 else UNSEEN

    def _own_sample(self, form: Form) -> Sample:
        """Look at this rank's data, where they lie in one piece."""
        assert form.sent is not None
        buffer = form.sent.buffer
        if not buffer.contiguous:
            return UNSEEN
        stream = get_device(buffer.device).stream()
        order_after(buffer, stream)
        found = self.codec.sample(buffer, stream).result()
        stream.close()
        return Sample(found.codec.name, found.ratio)


def _candidates(form: Form) -> list[str]:
    return [codec.name for codec in CANDIDATES.get(form.some.buffer.dtype.name, GENERAL)]


def _decision(choice: Choice, sample: Sample) -> Decision:
    if choice.algorithm is None:
        return OWN
    return Decision(choice.algorithm, choice.chunk, get_codec(sample.codec) if choice.encoded else PLAIN)


def _distinct(ways: list[Decision]) -> list[Decision]:
    """Leave out what is there already."""
    found: dict[object, Decision] = {}
    for way in ways:
        found.setdefault((way.algorithm, way.chunk, way.codec.spec, way.on and way.on.handle), way)
    return list(found.values())
