"""What trainings have shown, as data: a file holds any number of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.errors import BufferSpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Session", "Summary", "Trained", "joined", "load", "save", "summaries"]

FORMAT = "osu_bench training"
WARM_UP = 2
"""Steps at the start that are not counted: DDP makes its buckets anew after the first."""


@dataclass
class Trained:
    """One contender's training."""

    contender: str
    seed: int
    parameters: int
    seconds: list[float] = field(default_factory=list)
    """Of each step, on the slowest rank."""
    losses: list[float] = field(default_factory=list)
    """Of each step, the mean of the ranks."""
    parameter_bytes: list[int] = field(default_factory=list)
    gradient_bytes: list[int] = field(default_factory=list)
    """Sent in each step by the rank that sent most; empty where nobody knows."""
    validation: float = 0.0


@dataclass
class Session:
    """Trainings under one set of conditions, whose contenders took turns."""

    model: str
    size: str
    ranks: int
    rate: float | None
    """Bits a second of each host's link; None where nothing is known to limit it."""
    batch: int
    trained: list[Trained]
    machine: dict[str, Any] = field(default_factory=dict)

    def contenders(self) -> list[str]:
        """Return the contenders, in the order in which they were named."""
        return list(dict.fromkeys(one.contender for one in self.trained))


@dataclass(frozen=True)
class Summary:
    """The figures of one contender."""

    contender: str
    seconds: float
    """The median of a step."""
    saved: float | None
    """Median over the steps of the share of time saved, against the first contender's step beside it."""
    parameter_bytes: float | None
    gradient_bytes: float | None
    validation: float
    spread: float | None
    """The standard deviation over the seeds."""
    seeds: int


def summaries(session: Session) -> list[Summary]:
    """Return the figures of all contenders."""
    first = [one for one in session.trained if one.contender == session.contenders()[0]]
    return [_summary([one for one in session.trained if one.contender == name], first) for name in session.contenders()]


def _summary(runs: Sequence[Trained], first: Sequence[Trained]) -> Summary:
    pairs = [
        (ours, theirs)
        for one, other in zip(runs, first, strict=True)
        for ours, theirs in list(zip(one.seconds, other.seconds, strict=True))[WARM_UP:]
    ]
    losses = [one.validation for one in runs]
    return Summary(
        runs[0].contender,
        median(ours for ours, _ in pairs),
        median(1 - ours / theirs for ours, theirs in pairs) if runs[0] is not first[0] else None,
        _mean([count for one in runs for count in one.parameter_bytes[WARM_UP:]]),
        _mean([count for one in runs for count in one.gradient_bytes[WARM_UP:]]),
        mean(losses),
        stdev(losses) if len(losses) > 1 else None,
        len(losses),
    )


def _mean(counts: Sequence[int]) -> float | None:
    return mean(counts) if counts else None


def joined(sessions: Sequence[Session]) -> list[Session]:
    """Put sessions that differ in their seeds alone into one."""
    alike: dict[tuple[Any, ...], Session] = {}
    for one in sessions:
        steps = len(one.trained[0].seconds)
        key = (one.model, one.size, one.ranks, one.rate, one.batch, steps, *one.contenders())
        if key in alike:
            alike[key] = replace(alike[key], trained=[*alike[key].trained, *one.trained])
        else:
            alike[key] = one
    return list(alike.values())


def save(sessions: Sequence[Session], path: Path | str) -> None:
    """Write sessions as JSON."""
    text = json.dumps({"format": FORMAT, "sessions": [asdict(session) for session in sessions]}, separators=(",", ":"))
    partial = Path(f"{path}.partial")
    partial.write_text(text.replace('{"contender"', '\n{"contender"') + "\n")
    partial.replace(path)


def load(path: Path | str) -> list[Session]:
    """Read what `save` has written."""
    try:
        content = json.loads(Path(path).read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        return [_session(one) for one in content["sessions"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        got = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        remedy = "Make one with `osu_bench training --json FILE`."
        raise BufferSpecError(f"file {path}", expected="trainings of osu_bench", got=got, remedy=remedy) from error


def _session(content: dict[str, Any]) -> Session:
    trained = [Trained(**one) for one in content.pop("trained")]
    return Session(**content, trained=trained)
