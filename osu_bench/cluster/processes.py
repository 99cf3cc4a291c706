"""The processes inside network namespaces: who they are, and how they end."""

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
"""Number and start time, which together name a process even after its number was given to another."""

GRACE = 3.0
STEP = 0.05
# The fields of /proc/PID/stat that follow the program's name, which may hold anything.
STATE, START_TIME = 0, 19


def process(pid: int) -> Process | None:
    """Return a process that runs, or None where there is none or only its exit code is left."""
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
    """Return those inside these namespaces that were started with a variable, given as NAME=VALUE."""
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
    """Ask the processes that are found to end, and end those that have not after a while, with all they start."""
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
    """Let SIGTERM and SIGHUP raise SystemExit for a while, so that what stands in `finally` is done."""
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
