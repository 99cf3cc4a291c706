"""Tables of plain text."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Progress", "table"]

GAP = "  "


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> str:
    """Lay out rows below their header, each column as wide as it needs; those named in `right` end flush."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    flush = [name in right for name in header]
    return "\n".join(_line(cells, widths, flush) for cells in lines)


def _line(cells: Sequence[str], widths: Sequence[int], flush: Sequence[bool]) -> str:
    columns = zip(cells, widths, flush, strict=True)
    return GAP.join(cell.rjust(width) if end else cell.ljust(width) for cell, width, end in columns).rstrip()


# A bar that shows how far a command has come: on a terminal only, and never in the output itself.

WIDTH = 24
CLEAR = "\r\x1b[K"
"""Back to the start of the line, and empty it."""


class Progress:
    """The bar, for the length of a `with`; it leaves nothing behind."""

    def __init__(self, total: int, terminal: TextIO | None = None) -> None:
        """Expect `total` steps; draw on `terminal` (standard error) if it is one."""
        self._total, self._started = total, 0
        self._terminal = sys.stderr if terminal is None else terminal
        self._shown = self._terminal.isatty()

    def start(self, step: str) -> None:
        """Show that the next step begins, and its name."""
        filled = WIDTH * self._started // max(1, self._total)
        self._started += 1
        self._write(f"{CLEAR}[{'#' * filled}{'.' * (WIDTH - filled)}] {self._started} of {self._total}: {step}")

    def clear(self) -> None:
        """Empty the line, for something else to be printed."""
        self._write(CLEAR)

    def _write(self, text: str) -> None:
        if self._shown:
            self._terminal.write(text)
            self._terminal.flush()

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Empty the line."""
        self.clear()
