"""A small language for algorithms: transfers between ranks, in the order in which one would do them by hand.

    plan = Plan("chain", "broadcast", ranks=4, in_place=True)
    for rank in range(3):
        plan.copy(rank, o(0), rank + 1, o(0))
    algorithm = plan.algorithm()

Transfers happen one after the other; those inside `with plan.round()` happen at once: all of them read before any
writes. `schedule.lower` makes lanes and dependencies of it.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule.goal import COLLECTIVES, Goal
from mpi_gpucomp.schedule.ir import Algorithm, Place
from mpi_gpucomp.schedule.lower import Action, lower

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpi_gpucomp.schedule.ir import Lane, Program

__all__ = ["Plan", "i", "o", "rotated", "s"]


def i(offset: int) -> Place:
    """Name a chunk of the input."""
    return Place("i", offset)


def o(offset: int) -> Place:
    """Name a chunk of the output."""
    return Place("o", offset)


def s(offset: int) -> Place:
    """Name a chunk of scratch."""
    return Place("s", offset)


@dataclass(frozen=True)
class _Transfer:
    sender: int
    source: Place
    receiver: int
    target: Place
    operand: Place | None
    count: int
    channel: int


class Plan:
    """An algorithm that is being written; `nodes` says how the ranks lie on nodes, to those builders that care."""

    def __init__(
        self,
        name: str,
        collective: str,
        ranks: int,
        *,
        root: int = 0,
        in_place: bool = False,
        nodes: Sequence[Sequence[int]] = (),
    ) -> None:
        """Begin with an empty plan of one chunk, or one for each rank where every rank has a block of its own."""
        self.name, self.collective, self.ranks, self.root, self.in_place = name, collective, ranks, root, in_place
        self.nodes = nodes or [range(ranks)]
        self.chunks = ranks if COLLECTIVES[collective].blocks else 1
        self.plain_channels: set[int] = set()
        """Channels whose messages are not encoded, also where a codec is used."""
        self._actions: list[Action] = []
        self._round: list[_Transfer] | None = None

    def cut(self, chunks: int) -> None:
        """Cut the vector into so many chunks."""
        self.chunks = chunks

    def copy(
        self, sender: int, source: Place, receiver: int, target: Place, count: int = 1, *, channel: int = 0
    ) -> None:
        """Send chunks from one rank to another."""
        self._add(_Transfer(sender, source, receiver, target, None, count, channel))

    def reduce(
        self,
        sender: int,
        source: Place,
        receiver: int,
        target: Place,
        count: int = 1,
        *,
        operand: Place | None = None,
        channel: int = 0,
    ) -> None:
        """Send chunks and reduce them there with `operand` (what is at the target) into the target."""
        self._add(_Transfer(sender, source, receiver, target, operand or target, count, channel))

    def local_copy(self, rank: int, source: Place, target: Place, count: int = 1) -> None:
        """Copy chunks on a rank; where both are one memory there is nothing to do."""
        self._actions.append(Action(rank, "cpy", source, target, count))

    def local_reduce(self, rank: int, source: Place, target: Place, count: int = 1) -> None:
        """Reduce chunks on a rank into others."""
        self._actions.append(Action(rank, "re", source, target, count))

    @contextmanager
    def round(self) -> Iterator[None]:
        """Let the transfers of a `with` happen at once."""
        self._round = []
        try:
            yield
        finally:
            together, self._round = self._round, None
            self._do(together)

    def algorithm(self) -> Algorithm:
        """Return the finished algorithm, not yet checked."""
        goal = Goal(self.collective, self.ranks, self.chunks, self.root, self.in_place)
        programs = tuple(map(self._marked, lower(goal, self._actions)))
        root = self.root if COLLECTIVES[self.collective].rooted else None
        return Algorithm(self.name, self.collective, self.ranks, self.chunks, self.in_place, programs, root)

    def _marked(self, program: Program) -> Program:
        if not self.plain_channels:
            return program
        lanes = (
            replace(lane, plain=lane.send is not None and lane.channel in self.plain_channels) for lane in program.lanes
        )
        return replace(program, lanes=tuple(lanes))

    def _add(self, transfer: _Transfer) -> None:
        if self._round is None:
            self._do([transfer])
        else:
            self._round.append(transfer)

    def _do(self, transfers: list[_Transfer]) -> None:
        for it in transfers:
            self._actions.append(Action(it.sender, "s", it.source, None, it.count, it.receiver, it.channel))
        for it in transfers:
            kind = "rrc" if it.operand else "r"
            self._actions.append(Action(it.receiver, kind, it.operand, it.target, it.count, it.sender, it.channel))


def rotated(algorithm: Algorithm, root: int) -> Algorithm:
    """Return the algorithm with every rank's part played by the rank that is `root` further on."""
    if COLLECTIVES[algorithm.collective].blocks:
        raise ScheduleError(
            f"algorithm {algorithm.name}",
            expected="a collective of whole vectors (broadcast, reduce, allreduce) to rotate",
            got=algorithm.collective,
            remedy="Build it for the root: its places depend on the ranks.",
        )
    ranks = algorithm.ranks
    programs = [_moved(algorithm.programs[(rank - root) % ranks], root, ranks) for rank in range(ranks)]
    old = algorithm.root
    return replace(algorithm, programs=tuple(programs), root=None if old is None else (old + root) % ranks)


def _moved(program: Program, by: int, ranks: int) -> Program:
    def moved(peer: int | None) -> int | None:
        return None if peer is None else (peer + by) % ranks

    def along(lane: Lane) -> Lane:
        return replace(lane, send=moved(lane.send), receive=moved(lane.receive))

    return replace(program, lanes=tuple(map(along, program.lanes)))
