"""The alarms of all ranks, as their logs have them."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["Log"]

SAME_SECONDS = 3.0
"""How long the same words are the same alarm, of another rank."""


class Log:
    """The alarms of all ranks, and when each was first seen here."""

    def __init__(self, directory: Path) -> None:
        """Read the files of a directory."""
        self._directory, self._read = directory, dict[Path, int]()
        self.lines: list[tuple[float, str]] = []

    def look(self) -> None:
        """Read what is new; the same is said by all ranks, and counts once."""
        for path in sorted(self._directory.glob("*.alarms")):
            text = path.read_text()
            for line in text[self._read.get(path, 0) :].splitlines():
                said = line.partition(": ")[2]
                now = time.monotonic()
                if not any(said == known and now - at < SAME_SECONDS for at, known in self.lines[-20:]):
                    self.lines.append((now, said))
            self._read[path] = len(text)

    def wait(self, seconds: float, words: tuple[str, ...] | None, since: int) -> tuple[float, str] | None:
        """Wait for an alarm with these words, and return it."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.look()
            for at, said in self.lines[since:]:
                if words and not said.startswith("over") and all(word in said for word in words):
                    return at, said
            time.sleep(0.02)
        return None
