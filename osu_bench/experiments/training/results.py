"""Results of training runs, and their JSON file: a list of sessions.

Files and the fields read from them call a candidate `contender`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.errors import BufferSpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Session", "Summary", "TrainingRun", "load", "merge_seeds", "save", "summaries"]

FORMAT = "osu_bench training"
WARM_UP = 2
"""Initial steps left out of the figures: DDP rebuilds its buckets after the first."""


@dataclass
class TrainingRun:
    """One training run of one candidate."""

    contender: str
    seed: int
    parameters: int
    seconds: list[float] = field(default_factory=list)
    """Time of each step on the slowest rank."""
    losses: list[float] = field(default_factory=list)
    """Loss of each step, averaged over the ranks."""
    parameter_bytes: list[int] = field(default_factory=list)
    gradient_bytes: list[int] = field(default_factory=list)
    """Bytes sent per step by the busiest rank; empty if not counted."""
    validation: float = 0.0


@dataclass
class Session:
    """Runs under the same conditions, whose candidates alternated step by step."""

    model: str
    size: str
    ranks: int
    rate: float | None
    """Link rate of each host in bit/s; None if unshaped."""
    batch: int
    trained: list[TrainingRun]
    machine: dict[str, Any] = field(default_factory=dict)

    def candidates(self) -> list[str]:
        """Return the candidates in the order given."""
        return list(dict.fromkeys(run.contender for run in self.trained))


@dataclass(frozen=True)
class Summary:
    """The figures of one candidate."""

    candidate: str
    seconds: float
    """Median step time."""
    saved: float | None
    """Median fraction of time saved against the same step of the first candidate."""
    parameter_bytes: float | None
    gradient_bytes: float | None
    validation: float
    spread: float | None
    """Standard deviation over the seeds."""
    seeds: int


def summaries(session: Session) -> list[Summary]:
    """Summarise each candidate."""
    first = [run for run in session.trained if run.contender == session.candidates()[0]]
    return [_summary([run for run in session.trained if run.contender == name], first) for name in session.candidates()]


def _summary(runs: Sequence[TrainingRun], first: Sequence[TrainingRun]) -> Summary:
    pairs = [
        pair
        for run, baseline in zip(runs, first, strict=True)
        for pair in list(zip(run.seconds, baseline.seconds, strict=True))[WARM_UP:]
    ]
    losses = [run.validation for run in runs]
    return Summary(
        runs[0].contender,
        median(seconds for seconds, _ in pairs),
        median(1 - seconds / baseline for seconds, baseline in pairs) if runs[0] is not first[0] else None,
        _mean([count for run in runs for count in run.parameter_bytes[WARM_UP:]]),
        _mean([count for run in runs for count in run.gradient_bytes[WARM_UP:]]),
        mean(losses),
        stdev(losses) if len(losses) > 1 else None,
        len(losses),
    )


def _mean(counts: Sequence[int]) -> float | None:
    return mean(counts) if counts else None


def merge_seeds(sessions: Sequence[Session]) -> list[Session]:
    """Merge sessions that differ only in their seeds."""
    merged: dict[tuple[Any, ...], Session] = {}
    for session in sessions:
        steps = len(session.trained[0].seconds)
        key = (session.model, session.size, session.ranks, session.rate, session.batch, steps, *session.candidates())
        if key in merged:
            merged[key] = replace(merged[key], trained=[*merged[key].trained, *session.trained])
        else:
            merged[key] = session
    return list(merged.values())


def save(sessions: Sequence[Session], path: Path | str) -> None:
    """Write sessions to a JSON file."""
    text = json.dumps({"format": FORMAT, "sessions": [asdict(session) for session in sessions]}, separators=(",", ":"))
    partial = Path(f"{path}.partial")
    partial.write_text(text.replace('{"contender"', '\n{"contender"') + "\n")
    partial.replace(path)


def load(path: Path | str) -> list[Session]:
    """Read sessions from a file written by `save`."""
    try:
        content = json.loads(Path(path).read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        return [_session(entry) for entry in content["sessions"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        got = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        remedy = "Create one with `osu_bench training --json FILE`."
        raise BufferSpecError(
            f"file {path}", expected="results of `osu_bench training`", got=got, remedy=remedy
        ) from error


def _session(content: dict[str, Any]) -> Session:
    runs = [TrainingRun(**entry) for entry in content.pop("trained")]
    return Session(**content, trained=runs)
