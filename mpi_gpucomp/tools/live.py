"""What ranks and links do now, as lines of text for a terminal of some width."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mpi_gpucomp.monitor.reader import is_alive, rates
from mpi_gpucomp.tools.table import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.monitor.box import Box, LinkState

__all__ = ["BOLD", "CLEAR", "DIM", "GREEN", "RED", "RESET", "YELLOW", "Look", "screen"]

BOLD, DIM, RED, GREEN, YELLOW, RESET = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[0m"
CLEAR = "\x1b[H\x1b[J"
RANKS = ("rank", "host", "state", "calls", "sent/s", "received/s", "encoded/s", "decoded/s", "ratio", "last alarm")
LINKS = ("link", "rail", "now", "", "mean", "in flight", "waiting", "sent", "state")
BAR = 12
SECONDS = 1.0
ALARMS = 8


class Look:
    """Colours where they are wanted, and bars of blocks or of plain signs."""

    def __init__(self, *, colours: bool, unicode: bool) -> None:
        """Say what the terminal can show."""
        self._colours, self._full, self._empty = colours, "█" if unicode else "#", "░" if unicode else "."
        self.to = "→" if unicode else "->"

    def paint(self, text: str, colour: str) -> str:
        """Colour a text."""
        return f"{colour}{text}{RESET}" if self._colours else text

    def bar(self, share: float) -> str:
        """Draw how full something is."""
        full = round(BAR * max(0.0, min(1.0, share)))
        return self._full * full + self._empty * (BAR - full)


def _rate(value: float) -> str:
    return f"{value / 1e6:.0f} MB" if value >= 1e6 else f"{value / 1e3:.0f} KB" if value else "-"


def _size(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B" if value else "-"


def _state(box: Box) -> str:
    state = box.state
    if state.closed:
        return "ended"
    if not is_alive(box):
        return f"silent {time.time() - state.wall / 1e9:.0f} s"
    return "in a call" if state.begun > state.ended else "idle"


def _rank(box: Box) -> list[str]:
    head, state, now = box.head, box.state, rates(box, SECONDS)
    alarms = box.alarms
    shown = [_rate(value) if is_alive(box) else "-" for value in now[:4]]
    ratio = f"{state.plain / state.encoded:.2f}" if state.encoded else "-"
    return [
        str(head.rank),
        head.host,
        _state(box),
        f"{state.ended}/{state.begun}",
        *shown,
        ratio,
        alarms[-1][:8] if alarms else "-",
    ]


def _link(box: Box, link: LinkState, look: Look) -> list[str]:
    alive = is_alive(box)
    share = link.speed / link.mean if link.mean else 0.0
    state = "slow" if link.slow else "" if alive else "ended"
    return [
        *(f"{box.head.rank} {look.to} {link.peer}", str(link.rail), f"{_rate(link.speed)}/s", look.bar(share)),
        *(f"{_rate(link.mean)}/s", str(link.in_flight), _size(link.waiting), _size(link.nbytes), state),
    ]


def _painted(text: str, look: Look) -> list[str]:
    lines = text.splitlines()
    colours = {"slow": RED, "silent": RED, "ended": DIM, "in a call": GREEN}
    found = [look.paint(lines[0], BOLD)]
    for line in lines[1:]:
        colour = next((colour for word, colour in colours.items() if f"  {word}" in line), None)
        found.append(look.paint(line, colour) if colour else line)
    return found


def screen(boxes: Sequence[Box], look: Look, width: int = 120, height: int = 0) -> str:
    """Show all ranks, links and alarms; lines that do not fit are left out where the height is known."""
    size, alive = boxes[0].head.size, sum(is_alive(box) for box in boxes)
    title = f"mpi_gpucomp  {time.strftime('%H:%M:%S')}  {alive} of {size} ranks alive"
    lines = [look.paint(title, BOLD), ""]
    lines += _painted(table(RANKS, [_rank(box) for box in boxes], (*RANKS[3:9], "rank")), look)
    links = [_link(box, link, look) for box in boxes for link in box.links]
    if links:
        right = ("now", "mean", "in flight", "waiting", "sent", "rail")
        lines += ["", *_painted(table(LINKS, links, right), look)]
    alarms = sorted({text for box in boxes for text in box.alarms})[-ALARMS:]
    lines += ["", look.paint("alarms", BOLD), *(look.paint(text, _of_alarm(text)) for text in alarms)]
    lines += [] if alarms else [look.paint("none", GREEN)]
    if height and len(lines) > height:
        room = max(1, height - ALARMS - 3)
        lines = [
            *lines[:room],
            look.paint(f"... {len(lines) - height + 1} lines more", DIM),
            *lines[-(height - room - 1) :],
        ]
    return "\n".join(_cut(line, width) for line in lines)


def _of_alarm(text: str) -> str:
    return DIM if " over after " in text else YELLOW if " stall: " in text else RED


def _cut(line: str, width: int) -> str:
    """Cut a line that is too long; what colours it takes no room."""
    if len(line) <= width:
        return line
    shown, at = 0, 0
    while at < len(line) and shown < width:
        if line[at] == "\x1b":
            at = line.index("m", at) + 1
        else:
            shown, at = shown + 1, at + 1
    return line[:at] + (RESET if "\x1b" in line else "")
