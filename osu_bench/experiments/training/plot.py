"""Plot loss against time: one panel per session, one line per candidate, averaged over seeds."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from osu_bench.cluster.network import rate_label
from osu_bench.report.drawing import look
from osu_bench.report.plot import FAINT, GRID, INK, new_figure, save_figure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from osu_bench.experiments.training.results import Session, TrainingRun

__all__ = ["plot"]

COLUMNS = 2
SMOOTHING = 0.1
"""Window of the moving average, as a fraction of all steps."""


def plot(sessions: Sequence[Session], path: Path | str) -> None:
    """Plot the training loss of all candidates against accumulated step time."""
    columns, rows = min(COLUMNS, len(sessions)), -(-len(sessions) // COLUMNS)
    figure = new_figure(path, 0.6 + 3.7 * columns, 2.9 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes in panels[len(sessions) :]:
        axes.set_axis_off()
    for axes, session in zip(panels, sessions, strict=False):
        for name in session.candidates():
            _plot_candidate(axes, name, [run for run in session.trained if run.contender == name])
        _label_axes(axes, session)
    save_figure(figure, path)


def _plot_candidate(axes: Any, name: str, runs: Sequence[TrainingRun]) -> None:
    times = [list(accumulate(run.seconds)) for run in runs]
    losses = [_smooth(run.losses) for run in runs]
    x = [sum(values) / len(runs) for values in zip(*times, strict=True)]
    y = [sum(values) / len(runs) for values in zip(*losses, strict=True)]
    style = "--" if "/" in name else "-"  # the colour is that of the parameter codec
    axes.plot(x, y, color=look(name).light, linestyle=style, linewidth=1.4, label=name)


def _smooth(losses: Sequence[float]) -> list[float]:
    """Return the moving average of the losses."""
    width = max(1, round(SMOOTHING * len(losses)))
    windows = [losses[max(0, end - width) : end] for end in range(1, len(losses) + 1)]
    return [sum(window) / len(window) for window in windows]


def _label_axes(axes: Any, session: Session) -> None:
    network = f", {rate_label(session.rate)}" if session.rate else ""
    parameters = f"{session.trained[0].parameters / 1e6:.1f} M parameters"
    axes.set_title(f"{session.model}, {parameters}, {session.ranks} ranks{network}", loc="left", fontsize=9, color=INK)
    axes.set_xlabel("seconds", color=FAINT)
    axes.set_ylabel("training loss", color=FAINT)
    axes.tick_params(colors=FAINT, labelsize=8.5, length=3)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.legend(frameon=False, labelcolor=INK, fontsize=7)
