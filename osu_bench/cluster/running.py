"""A program that runs on a cluster, and its end."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from uuid import uuid4

from osu_bench.cluster.plan import Plan
from osu_bench.cluster.processes import GRACE, Process, end, marked, process

__all__ = ["Running"]

MARK = "OSU_BENCH_RUN"


class Running:
    """A program that goes on while its caller does other things, such as cutting links."""

    def __init__(self, plan: Plan, command: Sequence[str], environment: Mapping[str, str], capture: bool) -> None:
        """Start it, apart from the terminal, whose Ctrl-C would reach the launcher twice."""
        self._plan, self._mark = plan, f"{MARK}={uuid4().hex}"
        pipe = subprocess.PIPE if capture else None
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            env={**environment, MARK: self._mark.partition("=")[2]},
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit code."""
        return self.process.wait(timeout)

    def complete(self, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Wait for its end, and return what it has said; whatever keeps us from waiting ends it."""
        try:
            output, errors = self.process.communicate(timeout=timeout)
        except BaseException:
            self.end()
            raise
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, output, errors)

    def end(self, grace: float = GRACE) -> None:
        """End the launcher, which ends the ranks, and whatever is left of them."""
        end(self._launcher, grace)
        end(self.processes, grace)
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def _launcher(self) -> list[Process]:
        found = process(self.process.pid) if self.process.poll() is None else None
        return [found] if found else []

    def processes(self) -> list[Process]:
        """Return those of its processes that are alive: launcher, agents and ranks."""
        return marked(self._plan.namespaces, self._mark)

    def __enter__(self) -> Running:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.end()
