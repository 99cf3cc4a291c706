"""A small language for algorithms: transfers between ranks, in the order in which one would do them by hand.

    plan = Plan("chain", "broadcast", ranks=4, in_place=True)
    for rank in range(3):
        plan.copy(rank, o(0), rank + 1, o(0))
    algorithm = plan.algorithm()

Transfers happen one after the other; those inside `with plan.round()` happen at once: all of them read before any
writes. `schedule.lower` makes lanes and dependencies of it.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule.ir import COLLECTIVES, Algorithm, CollectiveSpec, Lane, Place, Program, Step
from mpi_gpucomp.schedule.verify.result import Memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Action", "ScheduleBuilder", "i", "lower", "o", "rotated", "s"]


# Turns actions in program order into lanes of steps, with the dependencies that keep the order's meaning.
#
# Each connection (a direction, a peer, a channel) becomes a lane, and so does what happens inside a rank. A chunk
# that is
# received and then sent on once becomes one step (rcs, rrcs), for which its two connections share a lane; a sum
# that only
# passes through is not stored (rrs). Dependencies follow from who wrote and who read each chunk last.

Connection = tuple[str, int, int]
"""A direction (s or r, or nothing inside a rank), a peer and a channel."""


@dataclass(frozen=True)
class Action:
    """What a rank does at one moment of a plan: s, r, rrc, cpy or re, as steps do."""

    rank: int
    kind: str
    source: Place | None
    target: Place | None
    count: int
    peer: int = -1
    channel: int = 0

    @property
    def connection(self) -> Connection:
        """Return the connection that it uses."""
        return ("" if self.peer < 0 else "s" if self.kind == "s" else "r", self.peer, self.channel)


@dataclass
class _Flow:
    """How data flows through the actions of a rank, by their position in its plan."""

    before: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """What must be done before each."""
    origins: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Who wrote what each reads; -1 is nobody."""
    readers: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Who reads what each wrote."""
    kept: set[int] = field(default_factory=set)
    """Those that wrote something which is there in the end."""


@dataclass
class _Group:
    """The actions that become one step: one of them, or a receive and the send that passes it on."""

    members: list[int]
    lane: int
    index: int


def lower(goal: CollectiveSpec, actions: Iterable[Action]) -> tuple[Program, ...]:
    """Make every rank's program of the actions of all ranks, which come in program order."""
    by_rank: list[list[Action]] = [[] for _ in range(goal.ranks)]
    for action in actions:
        by_rank[action.rank].append(action)
    return tuple(_program(goal, rank, own) for rank, own in enumerate(by_rank))


def _program(goal: CollectiveSpec, rank: int, actions: list[Action]) -> Program:
    memory = Memory(goal, rank)
    actions = [action for action in actions if not _goes_nowhere(action, memory)]
    flow = _flow(actions, memory)
    passed_on = _passed_on(actions, flow)
    lanes = _connections_of_lanes(actions, passed_on)
    groups = _groups(actions, passed_on, lanes)
    steps: list[list[Step]] = [[] for _ in lanes]
    for group, after in zip(groups, _dependencies(groups, flow), strict=True):
        steps[group.lane].append(_step([actions[n] for n in group.members], group, flow, after))
    made = tuple(_lane(connections, own) for connections, own in zip(lanes, steps, strict=True))
    return Program(goal.input_chunks(rank), goal.output_chunks(rank), _scratch(made), made)


def _goes_nowhere(action: Action, memory: Memory) -> bool:
    if action.kind != "cpy" or action.source is None or action.target is None:
        return False
    return memory.cells(action.source) == memory.cells(action.target)


def _flow(actions: Sequence[Action], memory: Memory) -> _Flow:
    flow = _Flow()
    writer: dict[int, int] = {}
    since: defaultdict[int, set[int]] = defaultdict(set)
    for now, action in enumerate(actions):
        read = [action.source, action.target] if action.kind == "re" else [action.source]
        for cell in _cells(read, action.count, memory):
            last = writer.get(cell, -1)
            flow.origins[now].add(last)
            flow.readers[last].add(now)
            since[cell].add(now)
        for cell in _cells([action.target], action.count, memory):
            flow.before[now] |= since.pop(cell, set()) | {writer.get(cell, -1)}
            writer[cell] = now
        flow.before[now] = (flow.before[now] | flow.origins[now]) - {-1, now}
    flow.kept = {last for cell, last in writer.items() if cell < memory.start["s"]}
    return flow


def _cells(places: Sequence[Place | None], count: int, memory: Memory) -> list[int]:
    return [cell for place in places if place is not None for cell in memory.cells(place, count)]


def _passed_on(actions: Sequence[Action], flow: _Flow) -> dict[int, int]:
    """Find the receives whose data one send passes on as it is, and that send."""
    found = {}
    for now, action in enumerate(actions):
        if action.kind == "s" and len(flow.origins[now]) == 1:
            (origin,) = flow.origins[now]
            sends = [reader for reader in flow.readers[origin] if actions[reader].kind == "s"]
            if origin >= 0 and sends == [now] and _same_data(actions[origin], action):
                found[origin] = now
    return found


def _same_data(receive: Action, send: Action) -> bool:
    same_place = (receive.target, receive.count) == (send.source, send.count)
    return receive.kind in ("r", "rrc") and same_place and receive.channel == send.channel


def _connections_of_lanes(actions: Sequence[Action], passed_on: dict[int, int]) -> list[list[Connection]]:
    """Share the connections out among lanes: those of a receive and of its send on together, the others alone."""
    partner: dict[Connection, Connection] = {}
    for receive, send in passed_on.items():
        pair = actions[receive].connection, actions[send].connection
        if not partner.keys() & pair:
            partner.update([pair, pair[::-1]])
    lanes: list[list[Connection]] = []
    for connection in dict.fromkeys(action.connection for action in actions):
        other = partner.get(connection)
        if other is None:
            lanes.append([connection])
        elif [other, connection] not in lanes:
            lanes.append([connection, other])
    return lanes


def _groups(
    actions: Sequence[Action], passed_on: dict[int, int], lanes: Sequence[Sequence[Connection]]
) -> list[_Group]:
    """Make steps of neighbours in a lane that belong together; they come in the order of their first action."""
    lane_of = {connection: number for number, lane in enumerate(lanes) for connection in lane}
    groups: list[_Group] = []
    last: dict[int, _Group] = {}
    for now, action in enumerate(actions):
        lane = lane_of[action.connection]
        before = last.get(lane)
        if before is not None and passed_on.get(before.members[0]) == now:
            before.members.append(now)
        else:
            last[lane] = _Group([now], lane, 0 if before is None else before.index + 1)
            groups.append(last[lane])
    return groups


def _dependencies(groups: Sequence[_Group], flow: _Flow) -> list[tuple[tuple[int, int], ...]]:
    """Find what each group waits for in other lanes, leaving out what follows from the rest."""
    number = {member: n for n, group in enumerate(groups) for member in group.members}
    last: dict[int, int] = {}
    behind: list[int] = []
    found = []
    for now, group in enumerate(groups):
        past = behind[last[group.lane]] if group.lane in last else 0
        waits = {number[before] for member in group.members for before in flow.before[member]} - {now}
        needed = []
        for other in sorted(waits, reverse=True):
            if not past >> other & 1:
                needed.append((groups[other].lane, groups[other].index))
                past |= behind[other]
        behind.append(past | 1 << now)
        last[group.lane] = now
        found.append(tuple(sorted(needed)))
    return found


def _step(members: Sequence[Action], group: _Group, flow: _Flow, after: tuple[tuple[int, int], ...]) -> Step:
    first = members[0]
    if len(members) == 1:
        return Step(first.kind, first.source, first.target, first.count, after)
    received, sent = group.members
    if first.kind == "r":
        return Step("rcs", None, first.target, first.count, after)
    if flow.readers[received] == {sent} and received not in flow.kept:
        return Step("rrs", first.source, None, first.count, after)
    return Step("rrcs", first.source, first.target, first.count, after)


def _lane(connections: Sequence[Connection], steps: list[Step]) -> Lane:
    peers = {direction: peer for direction, peer, _ in connections}
    return Lane(peers.get("s"), peers.get("r"), connections[0][2], tuple(steps))


def _scratch(lanes: Iterable[Lane]) -> int:
    used = ((step, place) for lane in lanes for step in lane.steps for place in (step.source, step.target))
    return max((place.offset + step.count for step, place in used if place and place.buffer == "s"), default=0)


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


class ScheduleBuilder:
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
        self.raw_channels: set[int] = set()
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
        goal = CollectiveSpec(self.collective, self.ranks, self.chunks, self.root, self.in_place)
        programs = tuple(map(self._marked, lower(goal, self._actions)))
        root = self.root if COLLECTIVES[self.collective].rooted else None
        return Algorithm(self.name, self.collective, self.ranks, self.chunks, self.in_place, programs, root)

    def _marked(self, program: Program) -> Program:
        if not self.raw_channels:
            return program
        lanes = (
            replace(lane, raw=lane.send is not None and lane.channel in self.raw_channels) for lane in program.lanes
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
