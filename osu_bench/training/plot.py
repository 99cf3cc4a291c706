"""Loss against time: a panel for each session, a line for each contender, the mean over its seeds."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from osu_bench.cluster.rate import in_words
from osu_bench.plot import FAINT, GRID, INK, new_figure, save_figure
from osu_bench.report.palette import look

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from osu_bench.training.results import Session, Trained

__all__ = ["plot"]

ACROSS = 2
SMOOTHED = 0.1
"""The share of the steps over which losses are averaged."""


def plot(sessions: Sequence[Session], path: Path | str) -> None:
    """Draw the training losses of all contenders against the time that they took, as they learned side by side."""
    across, down = min(ACROSS, len(sessions)), -(-len(sessions) // ACROSS)
    drawing = new_figure(path, 0.6 + 3.7 * across, 2.9 * down)
    panels = drawing.subplots(down, across, squeeze=False).flat
    for axes in panels[len(sessions) :]:
        axes.set_axis_off()
    for axes, session in zip(panels, sessions, strict=False):
        for name in session.contenders():
            _line(axes, name, [one for one in session.trained if one.contender == name])
        _scales(axes, session)
    save_figure(drawing, path)


def _line(axes: Any, name: str, runs: Sequence[Trained]) -> None:
    times = [list(accumulate(run.seconds)) for run in runs]
    losses = [_smooth(run.losses) for run in runs]
    x = [sum(several) / len(runs) for several in zip(*times, strict=True)]
    y = [sum(several) / len(runs) for several in zip(*losses, strict=True)]
    dashes = "--" if "/" in name else "-"  # it has the colour of its parameters' codec
    axes.plot(x, y, color=look(name).light, linestyle=dashes, linewidth=1.4, label=name)


def _smooth(losses: Sequence[float]) -> list[float]:
    """Average each loss with some before it."""
    width = max(1, round(SMOOTHED * len(losses)))
    spans = [losses[max(0, end - width) : end] for end in range(1, len(losses) + 1)]
    return [sum(span) / len(span) for span in spans]


def _scales(axes: Any, session: Session) -> None:
    network = f", {in_words(session.rate)}" if session.rate else ""
    parameters = f"{session.trained[0].parameters / 1e6:.1f} M parameters"
    axes.set_title(f"{session.model}, {parameters}, {session.ranks} ranks{network}", loc="left", fontsize=9, color=INK)
    axes.set_xlabel("seconds", color=FAINT)
    axes.set_ylabel("training loss", color=FAINT)
    axes.tick_params(colors=FAINT, labelsize=8.5, length=3)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.legend(frameon=False, labelcolor=INK, fontsize=7)
