"""The command `profile`, under mpirun: measures links, messages and codecs, and builds a topology from the times.

A topology has link costs, classes of links, the ports of nodes, and shared uplinks. An island is a set of nodes with
fast links among them and slow links to the others, such as the hosts of a rack. Measuring pairs one at a time shows
that the links between islands are slow, but not whether they share an uplink: several pairs are measured at once for
that, and share one if they take longer than each of them alone.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, zip_longest
from resource import RUSAGE_SELF, getrusage
from statistics import median
from time import perf_counter, process_time, sleep
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpi_gpucomp.cli.command import Command, Progress, add_options, allgather_json, table
from mpi_gpucomp.codec import frame, get_codec
from mpi_gpucomp.device import as_buffer, get_device
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.cost import CodecCost, LinkCost, MessageCost
from mpi_gpucomp.schedule.topology import DIRECTIONS, Port, ProcessorModel, Topology, write_topology

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from mpi4py import MPI

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.communicator import Communicator
    from mpi_gpucomp.device import Buffer, Memory, Stream

    Pair = tuple[int, int]
    Nodes = Sequence[Sequence[int]]

__all__ = [
    "COMMAND",
    "ContentionTest",
    "Fit",
    "build_topology",
    "contention_tests",
    "find_islands",
    "fit_link",
    "link_classes",
    "shared_port",
]

SIZES = (1, 1 << 18, 1 << 20, 1 << 22)
"""Message sizes in bytes: the first for the latency, the others for the bandwidth."""
MAX_SECONDS = 0.15
"""Longer messages are not measured after one that took this time."""
CONCURRENT_SECONDS = 0.1
"""The time that each message of a contention test should take alone."""
LATENCY_ROUNDS, BANDWIDTH_ROUNDS = 20, 3
MAX_RANKS = 12
"""With more ranks, only the first two of every node are measured."""
CODECS = ("none", "split", "zfp:rate=8", "bound:rel=1e-3")
MIN_CORES = 0.25

SAME_CLASS, SAME_CLASS_WITHIN_NODE = 1.25, 2.0
"""Links of one class differ at most by this factor; times through shared memory vary more than those of a network."""
SAME_PORT = 1.1
"""Ports that differ at most by this factor get the same rate."""
MIN_BANDWIDTH_BYTES = 1 << 18
"""Messages of at least this size determine the bandwidth of a link."""
MAX_CONCURRENT = 4
"""Pairs that are measured at once."""
CONTENTION = 1.3
"""Pairs share a link if together they take this many times longer than the slowest of them alone."""


def _add_arguments(parser: ArgumentParser) -> None:
    add_options(parser, "--output", required=True, help="file to write the topology to")
    parser.add_argument("--name", default="profiled", help="name of the topology (default profiled)")
    add_options(parser, "--codec", nargs="+", default=CODECS, help=f"codecs to measure (default {' '.join(CODECS)})")


def _run(args: Namespace) -> int:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    if comm.size < 2:
        remedy = "Start it under mpirun: mpirun -n 4 gpucomp profile -o topo.json."
        raise SpecError("profile", expected="at least 2 ranks", got="1", remedy=remedy)
    nodes = _nodes(comm, MPI.Get_processor_name())
    fits = _measure_links(comm, nodes)
    shared = _measure_contention(comm, nodes, fits)
    codecs, cores = _measure_codecs(comm, args.codec)
    source = f"measured on {comm.size} ranks, {MPI.Get_library_version().partition(',')[0]}"
    message_cost, polling = _measure_message_cost(comm, min(fit.latency for fit in fits.values()), cores)
    topology = build_topology(args.name, nodes, fits, source, shared)
    topology = replace(topology, codecs=codecs, message_cost=message_cost)
    if cores < comm.size:
        available = round(max(MIN_CORES, cores - polling), 2)
        topology = replace(topology, processors=(ProcessorModel(frozenset(range(comm.size)), available),))
    if comm.rank == 0:
        _write(topology, fits, args.output)
    comm.Free()
    return 0


def _nodes(comm: MPI.Intracomm, name: str) -> tuple[tuple[int, ...], ...]:
    names = allgather_json(comm, name)
    return tuple(tuple(rank for rank, other in enumerate(names) if other == one) for one in dict.fromkeys(names))


def _quiet_barrier(comm: MPI.Intracomm) -> None:
    """Wait for all ranks without using the core of those that still measure."""
    request = comm.Ibarrier()
    while not request.Test():
        sleep(1e-3)


def _reduce(comm: MPI.Intracomm, value: float, op: str) -> float:
    """Return the sum or the maximum over all ranks."""
    from mpi4py import MPI

    result = np.empty(1)
    comm.Allreduce(np.array([value]), result, {"sum": MPI.SUM, "max": MPI.MAX}[op])
    return float(result[0])


def _measure_links(comm: MPI.Intracomm, nodes: Nodes) -> dict[Pair, Fit]:
    """Measure one pair of ranks at a time, so that they do not disturb each other; return the fits on all ranks."""
    ranks = range(comm.size) if comm.size <= MAX_RANKS else sorted(rank for node in nodes for rank in node[:2])
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    fits: dict[Pair, Fit] = {}
    with Progress(len(pairs) if comm.rank == 0 else 0) as progress:
        for pair in pairs:
            if comm.rank == 0:
                progress.start(f"rank {pair[0]} to rank {pair[1]}")
            own = list(_times(comm, *pair)) if comm.rank in pair else []
            _quiet_barrier(comm)
            fits[pair] = fit_link(allgather_json(comm, own)[pair[0]])
    return fits


def _times(comm: MPI.Intracomm, sender: int, receiver: int) -> Iterator[tuple[int, float]]:
    """Yield the bytes and seconds of messages from one rank to another, each acknowledged by one byte."""
    data, reply = np.ones(SIZES[-1], np.uint8), np.ones(1, np.uint8)
    half = 0.0
    for nbytes in SIZES:
        best = float("inf")
        for _ in range(LATENCY_ROUNDS if nbytes == 1 else BANDWIDTH_ROUNDS):
            start = perf_counter()
            _exchange(comm, sender, receiver, data[:nbytes], reply)
            best = min(best, perf_counter() - start)
        # Both ranks use the sender's time, so that both stop at the same size.
        seconds = np.array([best])
        if comm.rank == sender:
            comm.Send(seconds, receiver)
        else:
            comm.Recv(seconds, sender)
        best = float(seconds[0])
        half = best / 2 if nbytes == 1 else half
        yield nbytes, best - half
        if best > MAX_SECONDS:
            return


def _exchange(
    comm: MPI.Intracomm, sender: int, receiver: int, data: np.ndarray[tuple[int], np.dtype[np.uint8]], reply: object
) -> None:
    """Send a message and its reply; ranks that are neither sender nor receiver do nothing."""
    if comm.rank == sender:
        comm.Send(data, receiver)
        comm.Recv(reply, receiver)
    elif comm.rank == receiver:
        comm.Recv(data, sender)
        comm.Send(reply, sender)


def _measure_contention(comm: MPI.Intracomm, nodes: Nodes, fits: dict[Pair, Fit]) -> list[Port]:
    """Measure several slow pairs at once, and return the ports that they share."""
    ports = []
    for test in contention_tests(nodes, find_islands(nodes, fits)):
        slowest = max(fits[pair].per_byte for pair in test.pairs)
        nbytes = int(min(SIZES[-1], max(SIZES[1], CONCURRENT_SECONDS / slowest if slowest else SIZES[-1])))
        ports.append(shared_port(test, fits, nbytes, _time_concurrent(comm, test, nbytes)))
    return [port for port in ports if port is not None]


def _time_concurrent(comm: MPI.Intracomm, test: ContentionTest, nbytes: int) -> float:
    """Return the median time until the last of several concurrent messages has arrived."""
    data, reply = np.ones(nbytes, np.uint8), np.ones(1, np.uint8)
    times: list[float] = []
    for _ in range(BANDWIDTH_ROUNDS):
        comm.Barrier()
        start = perf_counter()
        for sender, receiver in test.pairs:
            _exchange(comm, sender, receiver, data, reply)
        own = perf_counter() - start
        _quiet_barrier(comm)
        times.append(_reduce(comm, own, "max"))
    return median(times)


CODEC_BYTES, CODEC_CHUNKS = 1 << 20, 16
"""Bytes and number of chunks: more than a cache holds, as in a message."""
MIN_ROUNDS = 8
ALONE_SECONDS, SHARED_SECONDS = 0.05, 0.5
"""Time to measure a codec on one rank, and on all: long enough for the scheduler to give every rank its share."""
SHARED_CORES = 0.7
"""Ranks share cores if all together encode at less than this fraction of the rate of one alone."""


def _measure_codecs(comm: MPI.Intracomm, specs: Sequence[str]) -> tuple[dict[str, CodecCost], float]:
    """Measure the codecs on rank 0, then one of them on all ranks at once; return the costs and the cores available.

    Ranks that share cores also share caches and execution units, so each uses more CPU time than alone. All codecs
    are slowed down by that factor.
    """
    own = {spec: tuple(_codec_cost(spec)) for spec in specs} if comm.rank == 0 else {}
    _quiet_barrier(comm)
    alone = {spec: CodecCost(*cost) for spec, cost in allgather_json(comm, own)[0].items()}
    slowest = max(alone, key=lambda spec: alone[spec].encode)
    comm.Barrier()
    own_clock, own_cpu = _encode_cost(slowest)
    _quiet_barrier(comm)
    clock, cpu = _reduce(comm, own_clock, "sum") / comm.size, _reduce(comm, own_cpu, "sum") / comm.size
    best = alone[slowest].encode
    if best > SHARED_CORES * clock:
        return alone, float(comm.size)
    slowdown = max(1.0, cpu / best)
    costs = {spec: CodecCost(one.encode * slowdown, one.decode * slowdown, one.ratio) for spec, one in alone.items()}
    return costs, max(MIN_CORES, round(comm.size * slowdown * best / clock, 2))


def _codec_chunks() -> list[Buffer]:
    """Return chunks of values that resemble a network's weights."""
    values = np.random.default_rng(0).normal(0, 0.02, (CODEC_CHUNKS, CODEC_BYTES // 4)).astype(np.float32)
    return [as_buffer(chunk, writable=True) for chunk in values]


def _codec_cost(spec: str) -> CodecCost:
    """Measure a codec with frames and checksums, as the engine uses it."""
    codec, device = get_codec(spec), get_device("host")
    chunks, stream = _codec_chunks(), device.stream()
    with device.alloc(frame.max_frame_bytes(codec, chunks[0].count, chunks[0].dtype)) as room:
        nbytes = frame.encode(codec, chunks[0], room, 0, stream).result() or CODEC_BYTES
        encode = median(_time_chunks(_encoder(codec, room, stream), chunks, ALONE_SECONDS))
        header = frame.read_header(room, stream)

        def decode_chunk(chunk: Buffer) -> object:
            return frame.decode(codec, header, room, chunk, stream, op="replace").result()

        decode = median(_time_chunks(decode_chunk, chunks, ALONE_SECONDS))
    stream.close()
    return CodecCost(encode / CODEC_BYTES, decode / CODEC_BYTES, max(1.0, CODEC_BYTES / nbytes))


def _encode_cost(spec: str) -> tuple[float, float]:
    """Return the wall-clock and CPU seconds per byte of encoding while the other ranks encode as well."""
    codec, device = get_codec(spec), get_device("host")
    chunks, stream = _codec_chunks(), device.stream()
    with device.alloc(frame.max_frame_bytes(codec, chunks[0].count, chunks[0].dtype)) as room:
        clock, cpu = perf_counter(), process_time()
        rounds = len(_time_chunks(_encoder(codec, room, stream), chunks, SHARED_SECONDS))
        clock, cpu = perf_counter() - clock, process_time() - cpu
    stream.close()
    return clock / rounds / CODEC_BYTES, cpu / rounds / CODEC_BYTES


def _encoder(codec: Codec, room: Memory, stream: Stream) -> Callable[[Buffer], object]:
    return lambda chunk: frame.encode(codec, chunk, room, 0, stream).result()


def _time_chunks(run: Callable[[Buffer], object], chunks: Iterable[Buffer], seconds: float) -> list[float]:
    """Return the times of at least MIN_ROUNDS calls over at least this many seconds."""
    times: list[float] = []
    begin = perf_counter()
    for chunk in cycle(chunks):
        if len(times) >= MIN_ROUNDS and perf_counter() - begin > seconds:
            break
        clock, cpu = perf_counter(), process_time()
        run(chunk)
        # CPU time excludes preemption, but is the longer one where several workers share a chunk.
        times.append(min(perf_counter() - clock, process_time() - cpu))
    return times


# A message costs CPU time on both ends. The bandwidth of a slow network hides it, so small chunks are broadcast along a
# chain of all ranks: single chunks show how soon a rank notices an arrival, many chunks the CPU time per message. The
# time per byte is the CPU time of two ranks that sleep between polls of a long message.

SINGLE_ROUNDS, MANY_ROUNDS = 20, 3
MANY_CHUNKS = 512
LONG_BYTES, LONG_CHUNK = 1 << 22, 1 << 18
POLL_INTERVAL, PROBES = 2e-3, 50
ITEM_BYTES, ENCODED_CHUNK = 4, 512
"""Bytes of an element, which is the smallest chunk, and of a small chunk that a codec can encode."""
FRAME_CODEC = "zfp:rate=8"


def _measure_message_cost(comm: MPI.Intracomm, latency: float, cores: float) -> tuple[MessageCost, float]:
    """Return the cost of a message, and the number of cores that waiting ranks use for polling."""
    from mpi_gpucomp.communicator import Communicator  # here, because other commands run without MPI

    many = np.ones(MANY_CHUNKS * ENCODED_CHUNK // ITEM_BYTES, np.float32)
    with Communicator(comm, FRAME_CODEC, passthrough_bytes=0, monitor=False) as ranks:
        encoded = _time_call(comm, MANY_ROUNDS, lambda: ranks.Bcast(many, algorithm="chain", chunk=ENCODED_CHUNK))
    with Communicator(comm, "none", passthrough_bytes=0, monitor=False) as ranks:
        many = many[:MANY_CHUNKS]
        raw = _time_call(comm, MANY_ROUNDS, lambda: ranks.Bcast(many, algorithm="chain", chunk=ITEM_BYTES))
        single = _time_call(comm, SINGLE_ROUNDS, lambda: ranks.Bcast(many[:1], algorithm="chain"))
        cpu, clock = _long_broadcast(comm, ranks)
    encoded, raw = encoded / MANY_CHUNKS, raw / MANY_CHUNKS
    hops = comm.size - 1
    # A rank in the middle receives and sends every chunk, one after the other; all ranks together handle two ends of
    # every hop.
    message = raw / max(min(hops, 2), 2 * hops / cores)
    wait = max(0.0, single / hops - latency - 2 * message)
    # The first rank encodes a chunk, each of the others decodes it.
    frame_cost = max(0.0, min((encoded - raw) / 2, (encoded - raw) * cores / comm.size))
    cost = MessageCost(message, _cost_per_byte(comm), wait, frame_cost)
    handling = 2 * hops * LONG_BYTES / LONG_CHUNK * cost.seconds(LONG_CHUNK)
    return cost, max(0.0, cpu - handling) / clock


def _long_broadcast(comm: MPI.Intracomm, ranks: Communicator) -> tuple[float, float]:
    """Return the CPU seconds of all ranks together, and the wall-clock seconds, of one long broadcast."""
    data = np.ones(LONG_BYTES // ITEM_BYTES, np.float32)
    comm.Barrier()
    clock, cpu = perf_counter(), _cpu_seconds()
    ranks.Bcast(data, algorithm="chain", chunk=LONG_CHUNK)
    clock, cpu = perf_counter() - clock, _cpu_seconds() - cpu
    return _reduce(comm, cpu, "sum"), _reduce(comm, clock, "max")


def _time_call(comm: MPI.Intracomm, rounds: int, run: Callable[[], object]) -> float:
    """Return the median, after one call to warm up, of the times of the slowest rank."""
    times: list[float] = []
    for _ in range(rounds + 1):
        comm.Barrier()
        start = perf_counter()
        run()
        times.append(_reduce(comm, perf_counter() - start, "max"))
    return sorted(times[1:])[rounds // 2]


def _cost_per_byte(comm: MPI.Intracomm) -> float:
    """Return the CPU time per byte of one end: the mean of both ends of a message from the first to the last rank."""
    sender, receiver = 0, comm.size - 1
    data = np.ones(LONG_BYTES, np.uint8)
    cpu = 0.0
    if comm.rank in (sender, receiver):
        start = _cpu_seconds()
        request = comm.Isend(data, receiver) if comm.rank == sender else comm.Irecv(data, sender)
        polls = 1
        while not request.Test():
            sleep(POLL_INTERVAL)
            polls += 1
        cpu = _cpu_seconds() - start - polls * _poll_cost(comm)
    return _reduce(comm, max(0.0, cpu), "sum") / 2 / LONG_BYTES


def _poll_cost(comm: MPI.Intracomm) -> float:
    """Return the CPU time of a poll that finds nothing."""
    start = _cpu_seconds()
    for _ in range(PROBES):
        comm.Iprobe()
        sleep(POLL_INTERVAL / 10)
    return (_cpu_seconds() - start) / PROBES


def _cpu_seconds() -> float:
    usage = getrusage(RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _write(topology: Topology, fits: dict[Pair, Fit], path: Path) -> None:
    """Write the topology and print its costs."""
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
    message, per_byte, wait, frame_cost = topology.message_cost
    cores = topology.processors[0].cores if topology.processors else topology.ranks
    print(
        f"\n{topology.ranks} ranks on {len(topology.nodes)} nodes with {cores:.3g} cores; "
        f"the times differ from the fit by at most {residual:.1%}\n"
        f"CPU time of a message at each end: {message * 1e6:.0f} us and {per_byte * 1e12:.0f} us/MB, "
        f"{frame_cost * 1e6:.0f} us per frame; noticed after {wait * 1e6:.0f} us\n"
        f"wrote {path}"
    )


class Fit(NamedTuple):
    """A linear fit of the times of one link, and its relative root-mean-square error."""

    latency: float
    per_byte: float
    residual: float


def fit_link(times: Sequence[tuple[int, float]]) -> Fit:
    """Fit a latency and a time per byte to pairs of bytes and seconds, the shortest message first.

    The latency is the time of the shortest message: the errors of long messages are many times larger. The time per
    byte is fitted to the long messages, weighted by the inverse of their times.
    """
    latency = times[0][1]
    long = [(nbytes, seconds) for nbytes, seconds in times if nbytes >= MIN_BANDWIDTH_BYTES] or [times[-1]]
    weights = [1 / seconds for _, seconds in long]
    mean_x = sum(w * nbytes for w, (nbytes, _) in zip(weights, long, strict=True)) / sum(weights)
    mean_y = sum(w * seconds for w, (_, seconds) in zip(weights, long, strict=True)) / sum(weights)
    over = sum(w * (n - mean_x) * (s - mean_y) for w, (n, s) in zip(weights, long, strict=True))
    under = sum(w * (n - mean_x) ** 2 for w, (n, _) in zip(weights, long, strict=True))
    per_byte = max(0.0, over / under if under else (long[0][1] - latency) / long[0][0])
    begin = max(0.0, mean_y - per_byte * mean_x)
    errors = [(begin + n * per_byte) / s - 1 for n, s in long]
    return Fit(latency, per_byte, (sum(error**2 for error in errors) / len(errors)) ** 0.5)


def link_classes(fits: Mapping[Pair, Fit], factor: float = SAME_CLASS) -> list[tuple[LinkCost, list[Pair]]]:
    """Return classes of links of about the same speed, the fastest first, each with its cost and its links."""
    classes: list[list[Pair]] = []
    for pair in sorted(fits, key=lambda pair: fits[pair].per_byte):
        fastest = fits[classes[-1][0]].per_byte if classes else 0.0
        if classes and fits[pair].per_byte <= factor * fastest:
            classes[-1].append(pair)
        else:
            classes.append([pair])
    # A class of links that are slow in one direction only comes from a disturbed measurement.
    real = [pairs for pairs in classes if any(pair[::-1] in pairs for pair in pairs)] or classes
    return [(_median([fits[pair] for pair in pairs]), pairs) for pairs in real]


def _median(fits: Sequence[Fit]) -> LinkCost:
    """Return the medians, so that one disturbed measurement has no effect."""
    latencies, slopes = sorted(fit.latency for fit in fits), sorted(fit.per_byte for fit in fits)
    return LinkCost(latencies[len(fits) // 2], slopes[len(fits) // 2])


def build_topology(
    name: str,
    nodes: tuple[tuple[int, ...], ...],
    fits: Mapping[Pair, Fit],
    source: str,
    shared: Iterable[Port] = (),
) -> Topology:
    """Return the topology of the measured links; links that were not measured get the most common class.

    Each node has a port in each direction, as fast as its fastest link to another node; `shared` are ports of several
    nodes. Links that are slower than their ports get classes of their own.
    """
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
    inside = {pair: fit for pair, fit in fits.items() if node_of[pair[0]] == node_of[pair[1]]}
    outside = {pair: fit for pair, fit in fits.items() if pair not in inside}
    classes: dict[str, LinkCost] = {}
    pairs: dict[Pair, str | None] = {}
    within = _add_classes("within nodes", link_classes(inside, SAME_CLASS_WITHIN_NODE), classes, pairs)
    ports = _equalize([*node_ports(nodes, outside), *shared])
    explained: dict[Pair, Fit] = {}
    unexplained: dict[Pair, Fit] = {}
    for pair, fit in outside.items():
        slowest = max(port.per_byte for port in ports if _passes(port, *pair))
        (explained if fit.per_byte <= SAME_CLASS * slowest else unexplained)[pair] = fit
    between = None
    if explained:
        between = "between nodes"
        fastest = min(fit.per_byte for fit in explained.values())
        classes[between] = LinkCost(_median(list(explained.values())).latency, fastest)
    for number, (link, members) in enumerate(link_classes(unexplained)):
        classes[f"slow {number}"] = link
        pairs |= dict.fromkeys(members, f"slow {number}")
    return Topology(name, nodes, classes, within, between, pairs, ports, source=source)


def _add_classes(
    name: str,
    groups: Iterable[tuple[LinkCost, list[Pair]]],
    classes: dict[str, LinkCost],
    pairs: dict[Pair, str | None],
) -> str | None:
    """Add classes; the largest is that of all links that are not in `pairs`."""
    found = sorted(groups, key=lambda group: -len(group[1]))
    for number, (link, members) in enumerate(found):
        title = name if number == 0 else f"{name}, {number}"
        classes[title] = link
        pairs |= dict.fromkeys(members if number else [], title)
    return name if found else None


def _passes(port: Port, sender: int, receiver: int) -> bool:
    inner, outer = (sender, receiver) if port.direction == "out" else (receiver, sender)
    return inner in port.ranks and outer not in port.ranks


def node_ports(nodes: Sequence[Sequence[int]], fits: Mapping[Pair, Fit]) -> list[Port]:
    """Return the outgoing and incoming port of each node, as fast as its fastest link to another node."""
    ports = []
    for number, node in enumerate(nodes):
        for direction in DIRECTIONS:
            port = Port(f"node {number}, {direction}", frozenset(node), direction, 0.0, "between")
            own = [fit.per_byte for pair, fit in fits.items() if _passes(port, *pair)]
            if own:
                ports.append(port._replace(per_byte=min(own)))
    return ports


def _equalize(ports: list[Port]) -> tuple[Port, ...]:
    """Set ports of about the same rate to their median, so that symmetric nodes are symmetric in the topology."""
    rates: list[list[float]] = []
    for rate in sorted(port.per_byte for port in ports):
        if rates and rate <= SAME_PORT * rates[-1][0]:
            rates[-1].append(rate)
        else:
            rates.append([rate])
    middle = {rate: group[len(group) // 2] for group in rates for rate in group}
    return tuple(port._replace(per_byte=middle[port.per_byte]) for port in ports)


class ContentionTest(NamedTuple):
    """Pairs of sender and receiver to measure at once; all messages leave (`out`) or enter (`in`) the island."""

    island: int
    ranks: frozenset[int]
    direction: str
    pairs: tuple[Pair, ...]


def find_islands(nodes: Nodes, fits: Mapping[Pair, Fit]) -> list[list[int]]:
    """Return the islands, each as the indices of its nodes; a node may be an island by itself.

    Two nodes are in one island if the link between them is as fast as the fastest link of either.
    """
    best = {(port.ranks, port.direction): port.per_byte for port in node_ports(nodes, fits)}
    fastest: dict[Pair, float] = {}
    home = {rank: number for number, node in enumerate(nodes) for rank in node}
    for (a, b), fit in fits.items():
        if home[a] != home[b]:
            key = home[a], home[b]
            fastest[key] = min(fit.per_byte, fastest.get(key, fit.per_byte))

    def joined(a: int, b: int) -> bool:
        ends = best.get((frozenset(nodes[a]), "out")), best.get((frozenset(nodes[b]), "in"))
        limits = [end for end in ends if end is not None]
        return bool(limits) and fastest.get((a, b), float("inf")) <= SAME_CLASS * min(limits)

    found: list[list[int]] = []
    left = list(range(len(nodes)))
    while left:
        island = [left.pop(0)]
        for member in island:  # grows during the loop
            near = [other for other in left if joined(member, other) and joined(other, member)]
            island += near
            left = [other for other in left if other not in near]
        found.append(sorted(island))
    return found


def contention_tests(nodes: Nodes, islands: Sequence[Sequence[int]]) -> list[ContentionTest]:
    """Return the tests for shared uplinks: of each island with several nodes, out of it and into it."""
    tests = []
    for number, island in enumerate(islands):
        # Peers alternate between the other islands, so that as few as possible share the uplink of one.
        rounds = zip_longest(*(other for other in islands if other is not island))
        outside = [node for peers in rounds for node in peers if node is not None]
        pairs = [(nodes[a][0], nodes[b][0]) for a, b in zip(island, outside, strict=False)][:MAX_CONCURRENT]
        if len(pairs) < 2:
            continue
        ranks = frozenset(rank for node in island for rank in nodes[node])
        reverse = tuple((receiver, sender) for sender, receiver in pairs)
        tests += [
            ContentionTest(number, ranks, DIRECTIONS[0], tuple(pairs)),
            ContentionTest(number, ranks, DIRECTIONS[1], reverse),
        ]
    return tests


def shared_port(test: ContentionTest, fits: Mapping[Pair, Fit], nbytes: int, seconds: float) -> Port | None:
    """Return the port that the pairs of a test share, given the time of their messages together; None if none."""
    alone = max(fits[pair].latency + nbytes * fits[pair].per_byte for pair in test.pairs)
    if seconds < CONTENTION * alone:
        return None
    per_byte = seconds / (nbytes * len(test.pairs))
    return Port(f"island {test.island}, {test.direction}", test.ranks, test.direction, per_byte, "between")


COMMAND = Command(
    "profile",
    "measure the links and codecs of a cluster, and write them as a topology",
    "-o topo.json",
    _add_arguments,
    _run,
    mpirun=8,
)
