"""Processes inside network namespaces: find them and end them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from types import FrameType

from osu_bench.cluster.plan import path_of

__all__ = ["Process", "end", "marked", "process", "terminable", "within"]

Process = tuple[int, int]
"""Process id and start time, which identify a process even after its id is reused."""

GRACE = 3.0
STEP = 0.05
# Indices of the fields of /proc/PID/stat after the program name, which may contain spaces.
STATE, START_TIME = 0, 19


def process(pid: int) -> Process | None:
    """Return a running process by its id, or None if there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[STATE] in "ZX" else (pid, int(fields[START_TIME]))


def within(namespaces: Collection[str]) -> list[Process]:
    """Return the processes inside these namespaces."""
    files = {(found.st_dev, found.st_ino) for found in map(_stat, map(path_of, namespaces)) if found}

    def is_inside(pid: int) -> bool:
        found = _stat(Path(f"/proc/{pid}/ns/net"))
        return found is not None and (found.st_dev, found.st_ino) in files

    numbers = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [found for pid in numbers if pid != os.getpid() and is_inside(pid) and (found := process(pid))]


def marked(namespaces: Collection[str], variable: str) -> list[Process]:
    """Return the processes inside these namespaces whose environment has a variable, given as NAME=VALUE."""
    return [found for found in within(namespaces) if variable.encode() in _environment(found[0])]


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def end(found: Callable[[], Sequence[Process]], grace: float = GRACE) -> None:
    """Send SIGTERM to the processes that `found` returns, then SIGKILL until it returns none."""
    start = monotonic()
    _signal(found(), signal.SIGTERM)
    while (left := found()) and monotonic() < start + grace + GRACE:
        if monotonic() > start + grace:
            _signal(left, signal.SIGKILL)
        sleep(STEP)


def _signal(processes: Sequence[Process], number: signal.Signals) -> None:
    for one in processes:
        with suppress(ProcessLookupError):
            if process(one[0]) == one:
                os.kill(one[0], number)


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit within the block, so that `finally` clauses run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
