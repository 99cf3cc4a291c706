"""Builds algorithms from transfers between ranks, written in program order, and lowers them to lanes of steps.

    builder = ScheduleBuilder("chain", "broadcast", ranks=4, in_place=True)
    for rank in range(3):
        builder.copy(rank, o(0), rank + 1, o(0))
    algorithm = builder.algorithm()

Transfers happen one after the other; those inside `with builder.round()` happen at once: all of them read before any
writes.

Lowering preserves the meaning of program order. Each connection (direction, peer, channel) becomes a lane, and so do
the local operations of a rank. A chunk that is received and then forwarded once becomes one step (rcs, rrcs), whose two
connections share a lane; a sum that is only forwarded is not stored (rrs). Dependencies between lanes follow from the
last writer and the last readers of each chunk.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule.ir import COLLECTIVES, Algorithm, BufferMap, CollectiveSpec, Lane, Place, Program, Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Action", "ScheduleBuilder", "i", "lower", "o", "rotate", "s"]

Connection = tuple[str, int, int]
"""Direction (s, r, or empty for local operations), peer and channel."""


def i(offset: int) -> Place:
    """Return a chunk of the input."""
    return Place("i", offset)


def o(offset: int) -> Place:
    """Return a chunk of the output."""
    return Place("o", offset)


def s(offset: int) -> Place:
    """Return a chunk of scratch."""
    return Place("s", offset)


@dataclass(frozen=True)
class Action:
    """One operation of a rank in program order; its kind is s, r, rrc, cpy or re, as in `Step`."""

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
    """An algorithm under construction; `nodes` lists the ranks of each node, for hierarchical algorithms."""

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
        """Start with no transfers, and one chunk per block or, for whole vectors, one chunk."""
        self.name, self.collective, self.ranks, self.root, self.in_place = name, collective, ranks, root, in_place
        self.nodes = nodes or [range(ranks)]
        self.chunks = ranks if COLLECTIVES[collective].blocks else 1
        self.raw_channels: set[int] = set()
        """Channels whose messages are sent raw even when a codec is in use."""
        self._actions: list[Action] = []
        self._round: list[_Transfer] | None = None

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
        """Send chunks and reduce them with the receiver's `operand` (by default the target) into the target."""
        self._add(_Transfer(sender, source, receiver, target, operand or target, count, channel))

    def local_copy(self, rank: int, source: Place, target: Place, count: int = 1) -> None:
        """Copy chunks on a rank; a copy between aliased places is dropped."""
        self._actions.append(Action(rank, "cpy", source, target, count))

    def local_reduce(self, rank: int, source: Place, target: Place, count: int = 1) -> None:
        """Reduce chunks on a rank into others."""
        self._actions.append(Action(rank, "re", source, target, count))

    @contextmanager
    def round(self) -> Iterator[None]:
        """Make the transfers inside a `with` block concurrent."""
        self._round = []
        try:
            yield
        finally:
            transfers, self._round = self._round, None
            self._append(transfers)

    def algorithm(self) -> Algorithm:
        """Return the finished algorithm, not yet checked."""
        spec = CollectiveSpec(self.collective, self.ranks, self.chunks, self.root, self.in_place)
        programs = tuple(map(self._mark_raw_lanes, lower(spec, self._actions)))
        root = self.root if COLLECTIVES[self.collective].rooted else None
        return Algorithm(self.name, self.collective, self.ranks, self.chunks, self.in_place, programs, root)

    def _mark_raw_lanes(self, program: Program) -> Program:
        if not self.raw_channels:
            return program
        lanes = (
            replace(lane, raw=lane.send is not None and lane.channel in self.raw_channels) for lane in program.lanes
        )
        return replace(program, lanes=tuple(lanes))

    def _add(self, transfer: _Transfer) -> None:
        if self._round is None:
            self._append([transfer])
        else:
            self._round.append(transfer)

    def _append(self, transfers: list[_Transfer]) -> None:
        for it in transfers:
            self._actions.append(Action(it.sender, "s", it.source, None, it.count, it.receiver, it.channel))
        for it in transfers:
            kind = "rrc" if it.operand else "r"
            self._actions.append(Action(it.receiver, kind, it.operand, it.target, it.count, it.sender, it.channel))


@dataclass
class _Flow:
    """Data flow through the actions of a rank, by their position in program order."""

    before: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Actions that must complete before each."""
    origins: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Actions that wrote what each reads; -1 for the initial content."""
    readers: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Actions that read what each wrote."""
    live_out: set[int] = field(default_factory=set)
    """Actions whose result is in the input or output at the end."""


@dataclass
class _Group:
    """The actions of one step: a single action, or a receive and the send that forwards it."""

    members: list[int]
    lane: int
    index: int


def lower(spec: CollectiveSpec, actions: Iterable[Action]) -> tuple[Program, ...]:
    """Return the program of every rank from the actions of all ranks in program order."""
    by_rank: list[list[Action]] = [[] for _ in range(spec.ranks)]
    for action in actions:
        by_rank[action.rank].append(action)
    return tuple(_program(spec, rank, own) for rank, own in enumerate(by_rank))


def _program(spec: CollectiveSpec, rank: int, actions: list[Action]) -> Program:
    buffers = BufferMap(spec, rank)
    actions = [action for action in actions if not _is_no_op(action, buffers)]
    flow = _flow(actions, buffers)
    forwards = _forwards(actions, flow)
    lanes = _assign_lanes(actions, forwards)
    groups = _group_steps(actions, forwards, lanes)
    steps: list[list[Step]] = [[] for _ in lanes]
    for group, after in zip(groups, _dependencies(groups, flow), strict=True):
        steps[group.lane].append(_step([actions[n] for n in group.members], group, flow, after))
    made = tuple(_lane(connections, own) for connections, own in zip(lanes, steps, strict=True))
    return Program(spec.input_chunks(rank), spec.output_chunks(rank), _scratch_chunks(made), made)


def _is_no_op(action: Action, buffers: BufferMap) -> bool:
    if action.kind != "cpy" or action.source is None or action.target is None:
        return False
    return buffers.cells(action.source) == buffers.cells(action.target)


def _flow(actions: Sequence[Action], buffers: BufferMap) -> _Flow:
    flow = _Flow()
    writer: dict[int, int] = {}
    readers_since_write: defaultdict[int, set[int]] = defaultdict(set)
    for now, action in enumerate(actions):
        read = [action.source, action.target] if action.kind == "re" else [action.source]
        for cell in _cells(read, action.count, buffers):
            last = writer.get(cell, -1)
            flow.origins[now].add(last)
            flow.readers[last].add(now)
            readers_since_write[cell].add(now)
        for cell in _cells([action.target], action.count, buffers):
            flow.before[now] |= readers_since_write.pop(cell, set()) | {writer.get(cell, -1)}
            writer[cell] = now
        flow.before[now] = (flow.before[now] | flow.origins[now]) - {-1, now}
    flow.live_out = {last for cell, last in writer.items() if cell < buffers.start["s"]}
    return flow


def _cells(places: Sequence[Place | None], count: int, buffers: BufferMap) -> list[int]:
    return [cell for place in places if place is not None for cell in buffers.cells(place, count)]


def _forwards(actions: Sequence[Action], flow: _Flow) -> dict[int, int]:
    """Return the receives whose data exactly one send forwards, and that send."""
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


def _assign_lanes(actions: Sequence[Action], forwards: dict[int, int]) -> list[list[Connection]]:
    """Return the connections of each lane: those of a receive and its forwarding send together, others alone."""
    partner: dict[Connection, Connection] = {}
    for receive, send in forwards.items():
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


def _group_steps(
    actions: Sequence[Action], forwards: dict[int, int], lanes: Sequence[Sequence[Connection]]
) -> list[_Group]:
    """Group actions into steps, in the order of their first action; a forwarding send joins the receive before it."""
    lane_of = {connection: number for number, lane in enumerate(lanes) for connection in lane}
    groups: list[_Group] = []
    last: dict[int, _Group] = {}
    for now, action in enumerate(actions):
        lane = lane_of[action.connection]
        before = last.get(lane)
        if before is not None and forwards.get(before.members[0]) == now:
            before.members.append(now)
        else:
            last[lane] = _Group([now], lane, 0 if before is None else before.index + 1)
            groups.append(last[lane])
    return groups


def _dependencies(groups: Sequence[_Group], flow: _Flow) -> list[tuple[tuple[int, int], ...]]:
    """Return the steps of other lanes that each group waits for, without those implied by the others."""
    number = {member: n for n, group in enumerate(groups) for member in group.members}
    last: dict[int, int] = {}
    ancestors: list[int] = []
    found = []
    for now, group in enumerate(groups):
        past = ancestors[last[group.lane]] if group.lane in last else 0
        waits = {number[before] for member in group.members for before in flow.before[member]} - {now}
        needed = []
        for other in sorted(waits, reverse=True):
            if not past >> other & 1:
                needed.append((groups[other].lane, groups[other].index))
                past |= ancestors[other]
        ancestors.append(past | 1 << now)
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
    if flow.readers[received] == {sent} and received not in flow.live_out:
        return Step("rrs", first.source, None, first.count, after)
    return Step("rrcs", first.source, first.target, first.count, after)


def _lane(connections: Sequence[Connection], steps: list[Step]) -> Lane:
    peers = {direction: peer for direction, peer, _ in connections}
    return Lane(peers.get("s"), peers.get("r"), connections[0][2], tuple(steps))


def _scratch_chunks(lanes: Iterable[Lane]) -> int:
    used = ((step, place) for lane in lanes for step in lane.steps for place in (step.source, step.target))
    return max((place.offset + step.count for step, place in used if place and place.buffer == "s"), default=0)


def rotate(algorithm: Algorithm, offset: int) -> Algorithm:
    """Return the algorithm with the program of rank r assigned to rank r + `offset` (modulo the ranks)."""
    if COLLECTIVES[algorithm.collective].blocks:
        raise ScheduleError(
            f"algorithm {algorithm.name}",
            expected="a collective on whole vectors (broadcast, reduce, allreduce) to rotate",
            got=algorithm.collective,
            remedy="Build it for the root: its chunk offsets depend on the ranks.",
        )
    ranks = algorithm.ranks
    programs = [_rotate_peers(algorithm.programs[(rank - offset) % ranks], offset, ranks) for rank in range(ranks)]
    old = algorithm.root
    return replace(algorithm, programs=tuple(programs), root=None if old is None else (old + offset) % ranks)


def _rotate_peers(program: Program, offset: int, ranks: int) -> Program:
    def rotated(peer: int | None) -> int | None:
        return None if peer is None else (peer + offset) % ranks

    lanes = (replace(lane, send=rotated(lane.send), receive=rotated(lane.receive)) for lane in program.lanes)
    return replace(program, lanes=tuple(lanes))
