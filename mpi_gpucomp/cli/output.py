"""Output of the commands: tables, units, and a progress bar."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["CLEAR", "Progress", "milliseconds", "table"]

GAP = "  "


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> str:
    """Format rows below their header; the columns named in `right` are right-aligned."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    align = [str.rjust if name in right else str.ljust for name in header]
    return "\n".join(
        GAP.join(pad(cell, width) for pad, cell, width in zip(align, cells, widths, strict=True)).rstrip()
        for cells in lines
    )


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds."""
    return f"{seconds * 1e3:.4g} ms"


WIDTH = 24
CLEAR = "\r\x1b[K"
"""Return to the start of the line and erase it."""


class Progress:
    """A progress bar, drawn on a terminal only and erased at the end of the `with` block."""

    def __init__(self, total: int, terminal: TextIO | None = None) -> None:
        """Expect `total` steps; draw on `terminal`, by default standard error."""
        self._total, self._started = total, 0
        self._terminal = sys.stderr if terminal is None else terminal
        self._shown = self._terminal.isatty()

    def start(self, step: str) -> None:
        """Show that the next step, with this name, begins."""
        filled = WIDTH * self._started // max(1, self._total)
        self._started += 1
        self._write(f"{CLEAR}[{'#' * filled}{'.' * (WIDTH - filled)}] {self._started} of {self._total}: {step}")

    def clear(self) -> None:
        """Erase the line, so that other output can be printed."""
        self._write(CLEAR)

    def _write(self, text: str) -> None:
        if self._shown:
            self._terminal.write(text)
            self._terminal.flush()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Erase the line."""
        self.clear()
