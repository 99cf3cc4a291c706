"""Tables of plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["table"]

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
