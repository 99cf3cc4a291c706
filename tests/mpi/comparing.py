"""Runs a collective of ours in ways that are drawn, on buffers that are drawn, and compares with MPI's result."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import buffers
from calls import RANK, Case, answer, hold, kinds

from mpi_gpucomp import Communicator

IN_FLIGHT = 12
"""So many are started before the first of them is waited for."""


class Ledger:
    """What was compared, and what was found wrong on this rank."""

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
    """Values to be drawn at random, each of them once before any comes again."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._left: dict[object, list[Any]] = {}

    def draw(self, what: object, values: Any) -> Any:
        left = self._left.setdefault(what, [])
        if not left:
            left += values
            self._random.shuffle(left)
        return left.pop()


class Flying(NamedTuple):
    """A collective that was started."""

    title: str
    request: Any
    compare: Callable[[], None]


class Comparison:
    """Draws for all ranks alike how a case is run, and for each its own kinds of buffers."""

    def __init__(self, ledger: Ledger, comms: dict[str, Communicator], seed: int) -> None:
        self._ledger, self._comms = ledger, comms
        self._all, self._own = Deck(seed), Deck(seed * 1000 + RANK + 1)
        self._flying: list[Flying] = []

    def run(self, case: Case, options: list[dict[str, Any]]) -> None:
        """Run a case with some options, drawn, and compare now or when it has landed."""
        where = self._all.draw((case.method, "comm"), self._comms)
        started = self._all.draw((case.method, "start"), (False, True))
        chosen = self._all.draw((case.method, len(options)), options)
        known = [kinds(case, place) for place in (0, 1)]
        parts, mine = case.placed_parts(), [self._own.draw((case.method, id(some)), some) for some in known]
        sent, received = (hold(part, kind) for part, kind in zip(parts, mine, strict=True))
        names = [kind.__name__ for part, kind in zip(parts, mine, strict=True) if isinstance(part, list)]
        title = f"{where}.{'I' * started}{case} with {chosen}, {' to '.join(names)}"
        arguments, compare = case.arguments(sent.spec, received.spec), self._comparing(title, case, sent, received)
        with _Noted(self._ledger, title):
            if not started:
                getattr(self._comms[where], case.method)(*arguments, **chosen)
                compare()
                return
            request = getattr(self._comms[where], f"I{case.method.lower()}")(*arguments, **chosen)
            self._flying.append(Flying(title, request, compare))
        if len(self._flying) >= IN_FLIGHT:
            self.land()

    def _comparing(self, title: str, case: Case, sent: buffers.Held, received: buffers.Held) -> Callable[[], None]:
        wanted = answer(case)

        def compare() -> None:
            got = case.significant(received.read())
            self._ledger.check(got.tobytes() == wanted, title, got[:5])
            self._ledger.check(sent.intact() and received.intact(), title, "written beside the elements")

        return compare

    def land(self) -> None:
        """Wait for all that were started."""
        flying, self._flying = self._flying, []
        for one in flying:
            with _Noted(self._ledger, one.title):
                one.request.Wait()
                one.compare()


class _Noted:
    """Notes errors, so that one does not hide what comes behind it."""

    def __init__(self, ledger: Ledger, title: str) -> None:
        self._ledger, self._title = ledger, title

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Exception):
            self._ledger.check(False, self._title, f"{kind.__name__}: {error}")
        return isinstance(error, Exception)
