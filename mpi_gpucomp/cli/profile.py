"""The command `profile`, under mpirun: measures links and codecs, and writes them as a topology."""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import cycle, zip_longest
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import fmean, median
from time import perf_counter, process_time, sleep
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpi_gpucomp.cli.output import Progress, table
from mpi_gpucomp.codec import frame, get_codec
from mpi_gpucomp.device import as_buffer, get_device
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.cost import CodecCost, LinkCost, MessageCost
from mpi_gpucomp.schedule.topology import DIRECTIONS, Port, ProcessorModel, Topology, write_topology

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Pair = tuple[int, int]
    Nodes = Sequence[Sequence[int]]
    from collections.abc import Callable, Iterator, Sequence

    from mpi4py import MPI

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.communicator import Communicator
    from mpi_gpucomp.device import Buffer, Memory, Stream

__all__ = [
    "LEAST_CORES",
    "Fit",
    "Trial",
    "add",
    "codings",
    "fitted",
    "grouped",
    "handling",
    "island_port",
    "islands",
    "node_ports",
    "quiet_barrier",
    "topology_of",
    "trials",
]


# From measured times of messages to a topology: straight lines, classes of links, and what nodes share.

ALIKE, ALIKE_WITHIN = 1.25, 2.0
"""How many times slower a link may be than the quickest of its class; memory's times are noisier than a wire's."""
EQUAL = 1.1
"""How far ports may be apart that are taken for equal."""
LONG = 1 << 18
"""From here on the bytes of a message count, not what else it costs."""


class Fit(NamedTuple):
    """A link as a straight line through measured times, and how far they are from it: root mean square, as a share."""

    latency: float
    per_byte: float
    residual: float


def fitted(times: Sequence[tuple[int, float]]) -> Fit:
    """Fit a latency and a time per byte to bytes and seconds, of which the first is for a message of few bytes.

    The latency is that of the short message, so that errors of long ones, which are many times as large, do not hide
    it; the slope is that of the long ones, weighted so that each counts as much.
    """
    latency = times[0][1]
    long = [(nbytes, seconds) for nbytes, seconds in times if nbytes >= LONG] or [times[-1]]
    weights = [1 / seconds for _, seconds in long]
    mean_x = sum(w * nbytes for w, (nbytes, _) in zip(weights, long, strict=True)) / sum(weights)
    mean_y = sum(w * seconds for w, (_, seconds) in zip(weights, long, strict=True)) / sum(weights)
    over = sum(w * (n - mean_x) * (s - mean_y) for w, (n, s) in zip(weights, long, strict=True))
    under = sum(w * (n - mean_x) ** 2 for w, (n, _) in zip(weights, long, strict=True))
    per_byte = max(0.0, over / under if under else (long[0][1] - latency) / long[0][0])
    begin = max(0.0, mean_y - per_byte * mean_x)
    errors = [(begin + n * per_byte) / s - 1 for n, s in long]
    return Fit(latency, per_byte, (sum(error**2 for error in errors) / len(errors)) ** 0.5)


def grouped(fits: Mapping[tuple[int, int], Fit], alike: float = ALIKE) -> list[tuple[LinkCost, list[tuple[int, int]]]]:
    """Put links of about the same speed into one class each, the quickest first, with the mean of its links."""
    classes: list[list[tuple[int, int]]] = []
    for pair in sorted(fits, key=lambda pair: fits[pair].per_byte):
        quickest = fits[classes[-1][0]].per_byte if classes else 0.0
        if classes and fits[pair].per_byte <= alike * quickest:
            classes[-1].append(pair)
        else:
            classes.append([pair])
    # A class of links that are slow one way only is a measurement that was disturbed.
    real = [pairs for pairs in classes if any(pair[::-1] in pairs for pair in pairs)] or classes
    return [(_mean([fits[pair] for pair in pairs]), pairs) for pairs in real]


def _mean(fits: Sequence[Fit]) -> LinkCost:
    """Return the middle one of each number: one link that was disturbed does not count."""
    latencies, slopes = sorted(fit.latency for fit in fits), sorted(fit.per_byte for fit in fits)
    return LinkCost(latencies[len(fits) // 2], slopes[len(fits) // 2])


def topology_of(
    name: str,
    nodes: tuple[tuple[int, ...], ...],
    fits: Mapping[tuple[int, int], Fit],
    source: str,
    shared: Iterable[Port] = (),
) -> Topology:
    """Make a topology of the links that were measured; others are of the class of most that were.

    Each node has a port out and one in, as quick as its quickest link to another node; `shared` are ports of several
    nodes. A link that is slower than its ports is one of its own class.
    """
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
    inside = {pair: fit for pair, fit in fits.items() if node_of[pair[0]] == node_of[pair[1]]}
    outside = {pair: fit for pair, fit in fits.items() if pair not in inside}
    classes: dict[str, LinkCost] = {}
    pairs: dict[tuple[int, int], str | None] = {}
    within = _classes("within nodes", grouped(inside, ALIKE_WITHIN), classes, pairs)
    ports = _evened([*node_ports(nodes, outside), *shared])
    explained: dict[tuple[int, int], Fit] = {}
    unexplained: dict[tuple[int, int], Fit] = {}
    for pair, fit in outside.items():
        slowest = max(port.per_byte for port in ports if _passes(port, *pair))
        (explained if fit.per_byte <= ALIKE * slowest else unexplained)[pair] = fit
    between = None
    if explained:
        between = "between nodes"
        quickest = min(fit.per_byte for fit in explained.values())
        classes[between] = LinkCost(_mean(list(explained.values())).latency, quickest)
    for number, (link, members) in enumerate(grouped(unexplained)):
        classes[f"slow {number}"] = link
        pairs |= dict.fromkeys(members, f"slow {number}")
    return Topology(name, nodes, classes, within, between, pairs, ports, source=source)


def _classes(
    name: str,
    groups: Iterable[tuple[LinkCost, list[tuple[int, int]]]],
    classes: dict[str, LinkCost],
    pairs: dict[tuple[int, int], str | None],
) -> str | None:
    """Add classes, of which the largest is for all links that are not named."""
    found = sorted(groups, key=lambda group: -len(group[1]))
    for number, (link, members) in enumerate(found):
        title = name if number == 0 else f"{name}, {number}"
        classes[title] = link
        pairs |= dict.fromkeys(members if number else [], title)
    return name if found else None


def _passes(port: Port, sender: int, receiver: int) -> bool:
    inner, outer = (sender, receiver) if port.direction == "out" else (receiver, sender)
    return inner in port.ranks and outer not in port.ranks


def node_ports(nodes: Sequence[Sequence[int]], fits: Mapping[tuple[int, int], Fit]) -> list[Port]:
    """Return the ports of nodes out and in, each as quick as the quickest link to another node."""
    ports = []
    for number, node in enumerate(nodes):
        for way in DIRECTIONS:
            port = Port(f"node {number}, {way}", frozenset(node), way, 0.0, "between")
            own = [fit.per_byte for pair, fit in fits.items() if _passes(port, *pair)]
            if own:
                ports.append(port._replace(per_byte=min(own)))
    return ports


def _evened(ports: list[Port]) -> tuple[Port, ...]:
    """Give ports of about the same speed the same, so that nodes that are alike look alike."""
    rates: list[list[float]] = []
    for rate in sorted(port.per_byte for port in ports):
        if rates and rate <= EQUAL * rates[-1][0]:
            rates[-1].append(rate)
        else:
            rates.append([rate])
    middle = {rate: group[len(group) // 2] for group in rates for rate in group}
    return tuple(port._replace(per_byte=middle[port.per_byte]) for port in ports)


# Islands: nodes with quick links among them and slow ones to the others, such as the hosts of a rack.
#
# That the links between islands are slow shows in pairs that were measured alone. Whether what leaves an island also
# shares one way shows only in several pairs at once: if they take longer than each of them alone, they do.

AT_ONCE = 4
"""Pairs that are measured together at most."""
SHARED = 1.3
"""How many times longer than the slowest of them alone several pairs take together, if they share their way."""


class Trial(NamedTuple):
    """Pairs of sender and receiver to be measured at once, all of which leave (`out`) or enter (`in`) an island."""

    island: int
    ranks: frozenset[int]
    way: str
    pairs: tuple[Pair, ...]


def islands(nodes: Nodes, fits: Mapping[Pair, Fit]) -> list[list[int]]:
    """Return the numbers of the nodes of each island, in the order of their first; a node may be one by itself.

    Nodes belong together if they reach each other as quickly as either reaches anybody.
    """
    best = {(port.ranks, port.direction): port.per_byte for port in node_ports(nodes, fits)}
    quickest: dict[Pair, float] = {}
    home = {rank: number for number, node in enumerate(nodes) for rank in node}
    for (a, b), fit in fits.items():
        if home[a] != home[b]:
            key = home[a], home[b]
            quickest[key] = min(fit.per_byte, quickest.get(key, fit.per_byte))

    def joined(a: int, b: int) -> bool:
        ends = best.get((frozenset(nodes[a]), "out")), best.get((frozenset(nodes[b]), "in"))
        limits = [end for end in ends if end is not None]
        return bool(limits) and quickest.get((a, b), float("inf")) <= ALIKE * min(limits)

    found: list[list[int]] = []
    left = list(range(len(nodes)))
    while left:
        island = [left.pop(0)]
        for member in island:  # which grows meanwhile
            near = [other for other in left if joined(member, other) and joined(other, member)]
            island += near
            left = [other for other in left if other not in near]
        found.append(sorted(island))
    return found


def trials(nodes: Nodes, found: Sequence[Sequence[int]]) -> list[Trial]:
    """Return what is to be measured at once: of each island with several nodes, out of it and into it."""
    made = []
    for number, island in enumerate(found):
        # Of the other islands in turn, so that their own ways are shared by as few as possible.
        others = zip_longest(*(other for other in found if other is not island))
        outside = [node for turn in others for node in turn if node is not None]
        pairs = [(nodes[a][0], nodes[b][0]) for a, b in zip(island, outside, strict=False)][:AT_ONCE]
        if len(pairs) < 2:
            continue
        ranks = frozenset(rank for node in island for rank in nodes[node])
        made += [
            Trial(number, ranks, DIRECTIONS[0], tuple(pairs)),
            Trial(number, ranks, DIRECTIONS[1], tuple(map(_turned, pairs))),
        ]
    return made


def _turned(pair: Pair) -> Pair:
    return pair[1], pair[0]


def island_port(trial: Trial, fits: Mapping[Pair, Fit], nbytes: int, seconds: float) -> Port | None:
    """Return the port that the pairs of a trial share, given how long their messages took together; None if none."""
    alone = max(fits[pair].latency + nbytes * fits[pair].per_byte for pair in trial.pairs)
    if seconds < SHARED * alone:
        return None
    per_byte = seconds / (nbytes * len(trial.pairs))
    return Port(f"island {trial.island}, {trial.way}", trial.ranks, trial.way, per_byte, "between")


# Measures what a message costs the processors at its ends, as the engine sends and receives them.
#
# On a slow wire the time of long messages tells nothing about processors. So chunks of few bytes go along a chain
# of all
# ranks: one at a time shows how soon a rank notices what has come, many of them how much of a processor each takes.
# What
# bytes cost is the time of the processor (not of a clock) that ranks spend which sleep between looks at a long message.
# Ranks of the engine that wait for a message look for it often: these looks take some of the cores from the others.

SINGLE, MANY = 20, 512
"""Messages of one chunk that are sent one after the other, and chunks of one message."""
ROUNDS = 3
HANDLING_LONG, PIECE = 1 << 22, 1 << 18
NAP = 2e-3
ITEM, CODED = 4, 512
"""Bytes of the shortest chunk, and of a short one that a codec takes."""
CODEC = "zfp:rate=8"


def handling(comm: MPI.Intracomm, latency: float, cores: float) -> tuple[MessageCost, float]:
    """Measure: all ranks do, together; they share so many cores, and a link has this latency.

    Return what a message costs, and how many cores are busy with looking for messages while ranks wait.
    """
    from mpi_gpucomp.communicator import Communicator  # here, so that other commands run where there is no MPI

    many = np.ones(MANY * CODED // ITEM, np.float32)
    with Communicator(comm, CODEC, passthrough_bytes=0, monitor=False) as ranks:
        coded = _median(comm, ROUNDS, lambda: ranks.Bcast(many, algorithm="chain", chunk=CODED)) / MANY
    with Communicator(comm, "none", passthrough_bytes=0, monitor=False) as ranks:
        many = many[:MANY]
        together = _median(comm, ROUNDS, lambda: ranks.Bcast(many, algorithm="chain", chunk=ITEM)) / MANY
        alone = _median(comm, SINGLE, lambda: ranks.Bcast(many[:1], algorithm="chain"))
        used, spent = _used(comm, ranks)
    hops = comm.size - 1
    # Of each chunk a rank in the middle handles what it receives and what it sends, one after the other, and all ranks
    # together as many times as there are ends of hops.
    message = together / max(min(hops, 2), 2 * hops / cores)
    wait = max(0.0, alone / hops - latency - 2 * message)
    # The first rank encodes a chunk, and each of the others decodes it.
    frame = max(0.0, min((coded - together) / 2, (coded - together) * cores / comm.size))
    found = MessageCost(message, _per_byte(comm), wait, frame)
    handled = 2 * hops * HANDLING_LONG / PIECE * found.seconds(PIECE)
    return found, max(0.0, used - handled) / spent


def _used(comm: MPI.Intracomm, ranks: Communicator) -> tuple[float, float]:
    """Return the seconds of processors that a long message takes all ranks together, and those of a clock."""
    data = np.ones(HANDLING_LONG // ITEM, np.float32)
    comm.Barrier()
    start, used = perf_counter(), _processor()
    ranks.Bcast(data, algorithm="chain", chunk=PIECE)
    mine = _processor() - used, perf_counter() - start
    every = comm.allgather(mine)
    return sum(used for used, _ in every), max(spent for _, spent in every)


def _median(comm: MPI.Intracomm, rounds: int, run: Callable[[], object]) -> float:
    """Return the time of the slowest rank: the middle one of some, after one to warm up."""
    times: list[float] = []
    for _ in range(rounds + 1):
        comm.Barrier()
        start = perf_counter()
        run()
        times.append(max(comm.allgather(perf_counter() - start)))
    return sorted(times[1:])[rounds // 2]


def _per_byte(comm: MPI.Intracomm) -> float:
    """Return what a byte costs either end: the mean of both, from the first rank to the last."""
    ends = 0, comm.size - 1
    data = np.ones(HANDLING_LONG, np.uint8)
    spent = 0.0
    if comm.rank in ends:
        start = _processor()
        under_way = comm.Isend(data, ends[1]) if comm.rank == ends[0] else comm.Irecv(data, ends[0])
        looks = 1
        while not under_way.Test():
            sleep(NAP)
            looks += 1
        spent = _processor() - start - looks * _look(comm)
    total: float = sum(comm.allgather(max(0.0, spent)))
    return total / len(ends) / HANDLING_LONG


def _look(comm: MPI.Intracomm) -> float:
    """Return what it costs to look once, and find nothing."""
    start = _processor()
    for _ in range(50):
        comm.Iprobe()
        sleep(NAP / 10)
    return (_processor() - start) / 50


def _processor() -> float:
    used = getrusage(RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# Measures codecs on a rank of its own and on all ranks at once: their speeds, and how many cores ranks share.

BYTES, CHUNKS = 1 << 20, 16
"""Of a chunk, and how many there are: no cache has them all, as with a message."""
TRIES = 8
ALONE, SHARING = 0.05, 0.5
"""Seconds that a codec is tried alone, and in which ranks that share cores with others get their parts of them."""
CODING_SHARED = 0.7
"""If all ranks code together no faster than this share of what they would alone, they share cores."""
LEAST_CORES = 0.25


def quiet_barrier(comm: MPI.Intracomm) -> None:
    """Wait for all ranks without taking the core of those that measure."""
    arrived = comm.Ibarrier()
    while not arrived.Test():
        sleep(1e-3)


def codings(comm: MPI.Intracomm, specs: Sequence[str]) -> tuple[dict[str, CodecCost], float]:
    """Measure the codecs on rank 0 alone, then one on all ranks at once, which shows how many cores they have.

    Of cores that others use too it is the part that is left. Where ranks share them, caches and the halves of a core
    too, so each takes more of a processor's time than alone: by so much all codecs are slower.
    """
    alone = {spec: _coding(spec) for spec in specs} if comm.rank == 0 else {}
    quiet_barrier(comm)
    alone = comm.bcast(alone)
    slowest = max(alone, key=lambda spec: alone[spec].encode)
    comm.Barrier()
    own = _shared_encode(slowest)
    quiet_barrier(comm)
    clock, processor = (fmean(part) for part in zip(*comm.allgather(own), strict=True))
    best = alone[slowest].encode
    if best > CODING_SHARED * clock:
        return alone, float(comm.size)
    slower = max(1.0, processor / best)
    found = {spec: CodecCost(one.encode * slower, one.decode * slower, one.ratio) for spec, one in alone.items()}
    return found, max(LEAST_CORES, round(comm.size * slower * best / clock, 2))


def _values() -> list[Buffer]:
    """Return chunks of values like a network's weights."""
    values = np.random.default_rng(0).normal(0, 0.02, (CHUNKS, BYTES // 4)).astype(np.float32)
    return [as_buffer(chunk, writable=True) for chunk in values]


def _coding(spec: str) -> CodecCost:
    """Measure a codec as it works on chunks: with frames and their checksums."""
    codec, device = get_codec(spec), get_device("host")
    chunks, stream = _values(), device.stream()
    with device.alloc(frame.max_frame_bytes(codec, chunks[0].count, chunks[0].dtype)) as room:
        nbytes = frame.encode(codec, chunks[0], room, 0, stream).result() or BYTES
        encode = median(_tries(_encoder(codec, room, stream), chunks, ALONE))
        header = frame.read_header(room, stream)

        def decode(chunk: Buffer) -> object:
            return frame.decode(codec, header, room, chunk, stream, op="replace").result()

        back = median(_tries(decode, chunks, ALONE))
    stream.close()
    return CodecCost(encode / BYTES, back / BYTES, max(1.0, BYTES / nbytes))


def _shared_encode(spec: str) -> tuple[float, float]:
    """Return the seconds per byte, of a clock and of a processor, to encode while other ranks do."""
    codec, device = get_codec(spec), get_device("host")
    chunks, stream = _values(), device.stream()
    with device.alloc(frame.max_frame_bytes(codec, chunks[0].count, chunks[0].dtype)) as room:
        start, used = perf_counter(), process_time()
        tries = len(_tries(_encoder(codec, room, stream), chunks, SHARING))
        spent = perf_counter() - start, process_time() - used
    stream.close()
    return spent[0] / tries / BYTES, spent[1] / tries / BYTES


def _encoder(codec: Codec, room: Memory, stream: Stream) -> Callable[[Buffer], object]:
    return lambda chunk: frame.encode(codec, chunk, room, 0, stream).result()


def _tries(run: Callable[[Buffer], object], chunks: Iterable[Buffer], seconds: float) -> list[float]:
    """Return what each of some tries took, of a processor where others held it up, for so many seconds at least."""
    times: list[float] = []
    begun = perf_counter()
    for chunk in cycle(chunks):
        if len(times) >= TRIES and perf_counter() - begun > seconds:
            break
        start, used = perf_counter(), process_time()
        run(chunk)
        # Several workers share a chunk: then the clock's time is the shorter one.
        times.append(min(perf_counter() - start, process_time() - used))
    return times


SIZES = (1, 1 << 18, 1 << 20, 1 << 22)
"""Bytes of the messages: one for the latency, longer ones for the rate."""
SLOW = 0.15
"""Seconds after which no longer message is tried."""
TOGETHER = 0.1
"""Seconds that each of several messages at once should take alone."""
PROFILE_ROUNDS = 3
SHORT_ROUNDS = 20
MOST_MEASURED = 12
"""With more ranks only the first two of every node are measured."""
CODECS = ("none", "split", "zfp:rate=8", "bound:rel=1e-3")


def add(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    parser = commands.add_parser(
        "profile",
        help="measure links and codecs, under mpirun",
        description="Measure links and codecs: mpirun -n 8 python -m mpi_gpucomp profile -o topo.json.",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the topology's file")
    parser.add_argument("--name", default="profiled", help="of the topology")
    parser.add_argument("--codec", nargs="+", default=CODECS, metavar="SPEC", help=f"default {' '.join(CODECS)}")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    if comm.size < 2:
        remedy = "Start it under mpirun: mpirun -n 4 python -m mpi_gpucomp profile -o topo.json."
        raise SpecError("profile", expected="two ranks at least", got="one", remedy=remedy)
    nodes = _nodes(comm, MPI.Get_processor_name())
    fits = _links(comm, nodes)
    shared = _islands(comm, nodes, fits)
    codecs, cores = codings(comm, args.codec)
    source = f"measured on {comm.size} ranks, {MPI.Get_library_version().partition(',')[0]}"
    found, looking = handling(comm, min(fit.latency for fit in fits.values()), cores)
    topology = replace(topology_of(args.name, nodes, fits, source, shared), codecs=codecs, message_cost=found)
    if cores < comm.size:
        left = round(max(LEAST_CORES, cores - looking), 2)
        topology = replace(topology, processors=(ProcessorModel(frozenset(range(comm.size)), left),))
    if comm.rank == 0:
        _write(topology, fits, args.output)
    comm.Free()
    return 0


def _nodes(comm: MPI.Intracomm, name: str) -> tuple[tuple[int, ...], ...]:
    names = comm.allgather(name)
    return tuple(tuple(rank for rank, other in enumerate(names) if other == one) for one in dict.fromkeys(names))


def _pairs(nodes: Sequence[Sequence[int]], ranks: int) -> list[tuple[int, int]]:
    measured = range(ranks) if ranks <= MOST_MEASURED else sorted(rank for node in nodes for rank in node[:2])
    return [(a, b) for a in measured for b in measured if a != b]


def _links(comm: MPI.Intracomm, nodes: Sequence[Sequence[int]]) -> dict[tuple[int, int], Fit]:
    """Measure one pair after the other, so that none disturbs another; all ranks get all results."""
    pairs = _pairs(nodes, comm.size)
    fits: dict[tuple[int, int], Fit] = {}
    with Progress(len(pairs) if comm.rank == 0 else 0) as progress:
        for pair in pairs:
            if comm.rank == 0:
                progress.start(f"rank {pair[0]} to rank {pair[1]}")
            own = list(_times(comm, *pair)) if comm.rank in pair else []
            # Those who wait must not take the core of those who measure.
            quiet_barrier(comm)
            fits[pair] = fitted(comm.bcast(own, pair[0]))
    return fits


def _islands(comm: MPI.Intracomm, nodes: Sequence[Sequence[int]], fits: dict[tuple[int, int], Fit]) -> list[Port]:
    """Find what islands of nodes share: all ranks measure what was slow alone, several pairs at once."""
    ports = []
    for trial in trials(nodes, islands(nodes, fits)):
        slowest = max(fits[pair].per_byte for pair in trial.pairs)
        nbytes = int(min(SIZES[-1], max(SIZES[1], TOGETHER / slowest if slowest else SIZES[-1])))
        ports.append(island_port(trial, fits, nbytes, _together(comm, trial, nbytes)))
    return [port for port in ports if port is not None]


def _together(comm: MPI.Intracomm, trial: Trial, nbytes: int) -> float:
    """Return the seconds until the last of several messages has come, all sent at once: the median of a few."""
    data, answer = np.ones(nbytes, np.uint8), np.ones(1, np.uint8)
    times: list[float] = []
    for _ in range(PROFILE_ROUNDS):
        comm.Barrier()
        start = perf_counter()
        for sender, receiver in trial.pairs:
            if comm.rank == sender:
                comm.Send(data, receiver)
                comm.Recv(answer, receiver)
            elif comm.rank == receiver:
                comm.Recv(data, sender)
                comm.Send(answer, sender)
        own = perf_counter() - start
        quiet_barrier(comm)
        times.append(max(comm.allgather(own)))
    return sorted(times)[PROFILE_ROUNDS // 2]


def _times(comm: MPI.Intracomm, sender: int, receiver: int) -> Iterator[tuple[int, float]]:
    """Yield bytes and seconds of messages from one rank to another, each answered by a byte."""
    data, answer = np.ones(SIZES[-1], np.uint8), np.ones(1, np.uint8)
    there = comm.rank == sender
    half = 0.0
    for nbytes in SIZES:
        best = float("inf")
        for _ in range(SHORT_ROUNDS if nbytes == 1 else PROFILE_ROUNDS):
            start = perf_counter()
            if there:
                comm.Send(data[:nbytes], receiver)
                comm.Recv(answer, receiver)
            else:
                comm.Recv(data[:nbytes], sender)
                comm.Send(answer, sender)
            best = min(best, perf_counter() - start)
        # Both must come to the same decision about longer ones.
        best = _agreed(comm, best, sender, receiver)
        half = best / 2 if nbytes == 1 else half
        yield nbytes, best - half
        if best > SLOW:
            return


def _agreed(comm: MPI.Intracomm, seconds: float, sender: int, receiver: int) -> float:
    """Take the sender's time on both sides."""
    if comm.rank == sender:
        comm.send(seconds, receiver)
        return seconds
    return float(comm.recv(source=sender))


def _write(topology: Topology, fits: dict[tuple[int, int], Fit], path: Path) -> None:
    residual = max(fit.residual for fit in fits.values())
    lines = {
        f"{a} -> {b}": [round(fit.latency * 1e6, 2), round(fit.per_byte * 1e12, 1), round(fit.residual, 4)]
        for (a, b), fit in fits.items()
    }
    write_topology(topology, path, {"alpha_us, beta_us_per_MB, residual": lines})
    rows = [
        (name, f"{link.latency * 1e6:.1f}", f"{link.per_byte * 1e12:.0f}", f"{8e-9 / link.per_byte:.3g}")
        for name, link in topology.classes.items()
        if link.per_byte
    ]
    rows += [(port.name, "", f"{port.per_byte * 1e12:.0f}", f"{8e-9 / port.per_byte:.3g}") for port in topology.ports]
    right = ("alpha us", "beta us/MB", "Gbit/s")
    print(table(("links and ports", *right), rows, right))
    print(
        f"\n{topology.ranks} ranks on {len(topology.nodes)} nodes; no time is further than {residual:.1%} from its line"
    )
    message, per_byte, wait, frame = topology.message_cost
    cores = topology.processors[0].cores if topology.processors else topology.ranks
    print(f"a message takes a processor {message * 1e6:.0f} us and {per_byte * 1e12:.0f} us/MB at each end, ", end="")
    print(
        f"{frame * 1e6:.0f} us more for a frame, and is noticed after {wait * 1e6:.0f} us; ranks have {cores:.3g} cores"
    )
    print(f"written to {path}")
