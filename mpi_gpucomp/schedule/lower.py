"""Turns actions in program order into lanes of steps, with the dependencies that keep the order's meaning.

Each connection (a direction, a peer, a channel) becomes a lane, and so does what happens inside a rank. A chunk that is
received and then sent on once becomes one step (rcs, rrcs), for which its two connections share a lane; a sum that only
passes through is not stored (rrs). Dependencies follow from who wrote and who read each chunk last.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.ir import Lane, Place, Program, Step
from mpi_gpucomp.schedule.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mpi_gpucomp.schedule.goal import Goal

__all__ = ["Action", "lower"]

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


def lower(goal: Goal, actions: Iterable[Action]) -> tuple[Program, ...]:
    """Make every rank's program of the actions of all ranks, which come in program order."""
    by_rank: list[list[Action]] = [[] for _ in range(goal.ranks)]
    for action in actions:
        by_rank[action.rank].append(action)
    return tuple(_program(goal, rank, own) for rank, own in enumerate(by_rank))


def _program(goal: Goal, rank: int, actions: list[Action]) -> Program:
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
    return Program(goal.inputs(rank), goal.outputs(rank), _scratch(made), made)


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
