"""Runs collectives with random options on random kinds of buffers, and compares the results with native MPI."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import buffers
from calls import RANK, Case, answer, hold, kinds

from mpi_gpucomp import Communicator

IN_FLIGHT = 12
"""The number of requests that are started before the first is waited for."""


class Ledger:
    """Counts comparisons, and lists the differences on this rank."""

    def __init__(self) -> None:
        self.compared = 0
        self.wrong: list[str] = []

    def check(self, right: bool, title: str, got: object = "") -> None:
        self.compared += 1
        if not right:
            self.wrong.append(f"rank {RANK}: {title}: {got}")

    def same(self, title: str, got: object, wanted: object) -> None:
        self.check(got == wanted, title, f"{got!r} instead of {wanted!r}")


class Deck:
    """Draws values at random, each once before any is repeated."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._left: dict[object, list[Any]] = {}

    def draw(self, what: object, values: Any) -> Any:
        left = self._left.setdefault(what, [])
        if not left:
            left += values
            self._random.shuffle(left)
        return left.pop()


class Started(NamedTuple):
    """A non-blocking collective in flight."""

    title: str
    request: Any
    compare: Callable[[], None]


class Comparison:
    """Draws the same options on all ranks, and different kinds of buffers on each."""

    def __init__(self, ledger: Ledger, comms: dict[str, Communicator], seed: int) -> None:
        self._ledger, self._comms = ledger, comms
        self._all, self._own = Deck(seed), Deck(seed * 1000 + RANK + 1)
        self._started: list[Started] = []

    def run(self, case: Case, options: list[dict[str, Any]]) -> None:
        """Run a case with random options, and compare at once or when its request has completed."""
        where = self._all.draw((case.method, "comm"), self._comms)
        started = self._all.draw((case.method, "start"), (False, True))
        chosen = self._all.draw((case.method, len(options)), options)
        known = [kinds(case, place) for place in (0, 1)]
        parts, mine = case.placed_parts(), [self._own.draw((case.method, id(some)), some) for some in known]
        sent, received = (hold(part, kind) for part, kind in zip(parts, mine, strict=True))
        names = [kind.__name__ for part, kind in zip(parts, mine, strict=True) if isinstance(part, list)]
        title = f"{where}.{'I' * started}{case} with {chosen}, {' to '.join(names)}"
        arguments, compare = case.arguments(sent.spec, received.spec), self._comparer(title, case, sent, received)
        with _Recorded(self._ledger, title):
            if not started:
                getattr(self._comms[where], case.method)(*arguments, **chosen)
                compare()
                return
            request = getattr(self._comms[where], f"I{case.method.lower()}")(*arguments, **chosen)
            self._started.append(Started(title, request, compare))
        if len(self._started) >= IN_FLIGHT:
            self.wait_all()

    def _comparer(self, title: str, case: Case, sent: buffers.Held, received: buffers.Held) -> Callable[[], None]:
        wanted = answer(case)

        def compare() -> None:
            got = case.significant(received.read())
            self._ledger.check(got.tobytes() == wanted, title, got[:5])
            self._ledger.check(sent.intact() and received.intact(), title, "written beside the elements")

        return compare

    def wait_all(self) -> None:
        """Wait for all requests in flight, and compare."""
        in_flight, self._started = self._started, []
        for one in in_flight:
            with _Recorded(self._ledger, one.title):
                one.request.Wait()
                one.compare()


class _Recorded:
    """Records an exception as a difference and goes on."""

    def __init__(self, ledger: Ledger, title: str) -> None:
        self._ledger, self._title = ledger, title

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Exception):
            self._ledger.check(False, self._title, f"{kind.__name__}: {error}")
        return isinstance(error, Exception)
