"""Ranks that do one operation in a loop, as seen from outside: their turns, and what they say in the end."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from types import TracebackType

    from osu_bench.cluster.cluster import Cluster

__all__ = ["PLAIN", "Turn", "Watched"]

PLAIN = "plain"
"""In place of devices: mpi4py's own calls."""
NAP = 0.005


class Turn(NamedTuple):
    """One operation, by the machine's clock."""

    start: float
    end: float
    """When the first rank was through with it."""
    all: float
    """When all ranks had told each other so."""
    wrong: int
    missing: int = 0
    """Paths that were not there or not used again yet, as seen from all ranks."""

    @property
    def seconds(self) -> float:
        """How long it took until all were through."""
        return self.all - self.start


class Watched:
    """Ranks at work on a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        operation: str,
        nbytes: int,
        devices: str,
        timeout: float = 0.5,
        limit: float = 30.0,
        *,
        wire: str = "tcp",
        mpi: str = "openmpi",
        mpich: str | Path | None = None,
    ) -> None:
        """Start them; devices are those of rails, or PLAIN."""
        self.turns: list[Turn] = []
        self.said: list[dict[str, Any]] = []
        """What ranks have said besides: errors, and how their paths fared."""
        self._folder = tempfile.TemporaryDirectory()
        self._stop = Path(self._folder.name) / "stop"
        words = (operation, str(nbytes), devices, str(timeout), str(limit), wire, str(self._stop))
        program = [sys.executable, "-m", "osu_bench.failover.ranks", *words]
        self.running = cluster.start(program, mpi, capture=True, mpich=mpich)
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.running.process.stdout is not None
        for line in self.running.process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                self.errors.append(line)
                continue
            if "turn" in said:
                self.turns.append(Turn(said["start"], said["end"], said["all"], said["wrong"], said["missing"]))
            else:
                self.said.append(said)

    def _read_errors(self) -> None:
        assert self.running.process.stderr is not None
        self.errors += self.running.process.stderr

    def wait(self, turns: int, seconds: float = 60.0) -> bool:
        """Wait until so many turns are done in all; say whether they are."""
        until = time.monotonic() + seconds
        while len(self.turns) < turns and time.monotonic() < until and self.running.poll() is None:
            time.sleep(NAP)
        return len(self.turns) >= turns

    def more(self, turns: int, seconds: float = 60.0) -> bool:
        """Wait for so many more turns that begin from now on."""
        now, until = time.monotonic(), time.monotonic() + seconds
        while time.monotonic() < until and self.running.poll() is None:
            if sum(turn.start > now for turn in self.turns[-turns - 1 :]) >= turns:
                return True
            time.sleep(NAP)
        return False

    def whole(self, seconds: float = 60.0) -> bool:
        """Wait until all paths are there."""
        until = time.monotonic() + seconds
        while self.turns[-1].missing and time.monotonic() < until and self.running.poll() is None:
            time.sleep(NAP)
        return not self.turns[-1].missing

    def finish(self, seconds: float = 60.0) -> int | None:
        """Let the ranks stop, and return their exit code; None if they do not."""
        self._stop.touch()
        until = time.monotonic() + seconds
        while self.running.poll() is None and time.monotonic() < until:
            time.sleep(NAP)
        code = self.running.poll()
        self.end()
        return code

    def end(self) -> None:
        """End them, whatever they do."""
        self.running.end()
        for thread in self._threads:
            thread.join(10)
        self._folder.cleanup()

    def __enter__(self) -> Watched:
        """Use them for the length of a `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what is left of them."""
        self.end()
