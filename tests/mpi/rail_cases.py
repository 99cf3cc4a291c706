"""Run under mpirun: rails on two loopback addresses, whose paths break during communication.

rail_cases.py RAILS [CASE...]    rank 0 prints the results of all ranks
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator, GpucompError
from mpi_gpucomp.core.library import core
from mpi_gpucomp.monitor.exporters import chrome_trace
from mpi_gpucomp.trace import RECV, SEND
from mpi_gpucomp.transport.rails import Rails
from mpi_gpucomp.transport.rails.connector import Hello, InitiatorHandshake

WORLD = MPI.COMM_WORLD
WIRE = os.environ.get("MPI_GPUCOMP_RAIL_WIRE", "tcp")
RANK, SIZE = WORLD.rank, WORLD.size
NEXT, PREVIOUS = (RANK + 1) % SIZE, (RANK - 1) % SIZE
RAILS = sys.argv[1]
CUTS = 40
CASES: dict[str, Callable[[], object]] = {}


def case(function: Callable[[], object]) -> Callable[[], object]:
    CASES[function.__name__] = function
    return function


def make_comm(limit: float = 30.0, **options: object) -> Communicator:
    return Communicator(WORLD, rails=Rails(RAILS, 0.3, limit, WIRE), **options)


def error_of(work: Callable[[], object]) -> str:
    try:
        work()
        return "no error"
    except GpucompError as error:
        return f"{type(error).__name__}: {error}"


def cut(comm: Communicator, peer: int, rail: int) -> bool:
    """Break a path from inside at any point: half a packet may be in flight."""
    connections = comm._runtime.wire.connections
    generation = connections._peers[peer].paths.get(rail)
    if generation is None:
        return False
    if WIRE == "ucx" and generation % 2:
        with connections._loop.lock, suppress(OSError):  # the peer may have cut it at the same time
            for hello, bridge in connections._bridges.items():
                if {hello.initiator, hello.responder} == {RANK, peer} and hello.path == rail and bridge.open:
                    bridge._side_channel.shutdown(socket.SHUT_RDWR)
                    return True
        return False
    core().gc_tcp_drop_path(connections.handle, peer, rail, b"cut by the test")
    return True


@contextmanager
def cutting(comm: Communicator, seed: int) -> Iterator[list[int]]:
    """Break random paths at random times in a thread, and count them."""
    ended, cuts, draw = threading.Event(), [0], random.Random(seed)

    def run() -> None:
        while not ended.wait(draw.uniform(0, 0.03 if WIRE == "tcp" else 0.3)):  # a path over UCX takes longer to make
            peer = draw.choice([peer for peer in range(SIZE) if peer != RANK])
            cuts[0] += cut(comm, peer, draw.randrange(2))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield cuts
    finally:
        ended.set()
        thread.join()


def rounds(comm: Communicator, cuts: list[int]) -> Iterator[int]:
    """Yield rounds until the ranks have cut enough paths in total."""
    total, number = np.zeros(1), 0
    while total[0] < CUTS:
        yield number
        number += 1
        comm.Allreduce(np.array([float(cuts[0])]), total)


def values(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1000, 1000, count).astype(np.float32)


@case
def collectives_under_cuts() -> int:
    """Broadcast and reduce while paths break; return the number of wrong results."""
    wrong = 0
    with make_comm(codec="none", chunk=200_000) as comm, cutting(comm, RANK) as cuts:
        for number in rounds(comm, cuts):
            buffer = values(700_001, number)
            expected = buffer.copy()
            if number % SIZE != RANK:
                buffer[:] = 0
            comm.Bcast(buffer, number % SIZE)
            wrong += not np.array_equal(buffer, expected)
            total = np.zeros(300_007, np.float32)
            comm.Allreduce(values(300_007, RANK + number), total, codec="split" if number % 2 else None)
            wrong += not np.array_equal(total, sum(values(300_007, rank + number) for rank in range(SIZE)))
            comm.Barrier()
    return int(wrong)


@case
def messages_under_cuts() -> int:
    """Pass long and short messages around a ring while paths break."""
    wrong = 0
    with make_comm() as comm, cutting(comm, 100 + RANK) as cuts:
        for number in rounds(comm, cuts):
            sent, buffer = values(2_000_003, RANK + number), np.zeros(2_000_005, np.float32)
            status = MPI.Status()
            comm.Sendrecv(sent, NEXT, number, buffer, PREVIOUS, number, status)
            wrong += not np.array_equal(buffer[:-2], values(2_000_003, PREVIOUS + number)) or bool(buffer[-2:].any())
            wrong += (status.source, status.tag, status.Get_count(MPI.FLOAT)) != (PREVIOUS, number, sent.size)
            for small in range(20):
                comm.Isend(np.full(10, small, np.int32), NEXT, 99)
            got = np.zeros(10, np.int32)
            for small in range(20):
                comm.Recv(got, MPI.ANY_SOURCE, 99)
                wrong += bool((got != small).any())
            comm.Barrier()  # keeps a fast neighbour's next messages apart
    return int(wrong)


@case
def all_paths_at_once() -> int:
    """Cut both paths to a peer: the traffic continues on the next one that is made."""
    with make_comm() as comm:
        sent, buffer = values(5_000_000, RANK), np.zeros(5_000_000, np.float32)
        requests = [comm.Irecv(buffer, PREVIOUS, 3), comm.Isend(sent, NEXT, 3)]
        for rail in (0, 1):
            cut(comm, NEXT, rail)
        for request in requests:
            request.Wait()
        lost = {(one.peer, one.rail) for one in comm.rail_stats().failovers}
        assert {(NEXT, 0), (NEXT, 1)} <= lost, lost
        return int((buffer != values(5_000_000, PREVIOUS)).sum())


@case
def no_copies() -> list[int]:
    """Count the bytes copied for long messages between host buffers: none."""
    with make_comm(codec="none") as comm:
        comm.Barrier()
        before = comm.rail_stats().copies
        buffer = np.zeros(16_000_000, np.float32)
        comm.Sendrecv(np.ones(16_000_000, np.float32), NEXT, 3, buffer, PREVIOUS, 3)
        assert buffer.all()
        comm.Bcast(buffer, 0)
        after = comm.rail_stats().copies
    return [after.nbytes - before.nbytes, int(comm.stats().bytes_sent > 0)]


def remaining_bytes(connection: socket.socket) -> bytes:
    """Return what an unauthenticated peer receives before it is disconnected."""
    with connection:
        try:
            return connection.recv(1000)
        except ConnectionResetError:
            return b""


@case
def unauthenticated() -> list[int]:
    """Connect without the secret, with garbage, or silently; communication is not disturbed."""
    with make_comm() as comm:
        connector = comm._runtime.wire.connections._connector
        ports = [listener.getsockname() for listener in connector._listeners]
        held = []
        for number in range(30):
            connection = socket.create_connection(ports[number % 2], timeout=5)
            held.append(connection)
            hello = Hello(0, RANK, number % 2, 1 << 20)
            first = [
                os.urandom(200),
                InitiatorHandshake(os.urandom(32), hello).first,
                b"G",
                b"GET / HTTP/1.1\r\n\r\n",
                b"",
            ]
            connection.sendall(first[number % 5])
            if number % 5 == 1 and RANK > 0:
                answer = connection.recv(1000)
                assert len(answer) == 64
                connection.sendall(bytes(32))
                assert connection.recv(1000) == b""
        buffer = values(100_000, 3 if RANK == 0 else 4)
        comm.Bcast(buffer, 0)
        assert np.array_equal(buffer, values(100_000, 3))
        deadline = time.monotonic() + 20
        while connector._pending and time.monotonic() < deadline:
            time.sleep(0.01)
        left = len(connector._pending)
        received = [remaining_bytes(connection) for number, connection in enumerate(held) if number % 5 != 1]
        return [left, sum(map(bool, received)), len(comm.rail_stats().failovers)]


@case
def records_name_the_rail() -> list[list[int]]:
    """Send over the first rail and, once that is cut, over the second; return the rails in the records."""
    found = []
    with make_comm(codec="none") as comm:
        comm.Barrier()
        records = comm._runtime.monitor.process.buffer
        for _ in range(2):
            before = len(records.records())
            buffer = np.zeros(1_000_000, np.float32)
            comm.Sendrecv(values(1_000_000, RANK), NEXT, 3, buffer, PREVIOUS, 3)
            assert np.array_equal(buffer, values(1_000_000, PREVIOUS))
            some = records.records()[before:]
            found.append(
                sorted({(int(one["kind"] == SEND), int(one["rail"])) for one in some if one["kind"] in (SEND, RECV)})
            )
            comm.Barrier()
            for peer in {NEXT, PREVIOUS}:
                cut(comm, peer, 0)
        assert {
            one["args"]["rail"] for one in chrome_trace([records])["traceEvents"] if "rail" in one.get("args", ())
        } == {
            0,
            1,
        }
    return found


@case
def different_wires() -> list[str]:
    """Request UCX where one rank does not have it, and different wires on different ranks."""
    if RANK == 1:
        sys.modules["ucxx"] = None  # makes its import fail
    found = [error_of(lambda: Communicator(WORLD, rails=Rails(RAILS, wire="ucx")))]
    with Communicator(WORLD, rails=Rails(RAILS, wire="auto")) as comm:
        found += [type(one).__name__ for one in comm._runtime.wire.connections._connector._backends]
    found.append(error_of(lambda: Communicator(WORLD, rails=Rails(RAILS, wire="auto" if RANK == 1 else "tcp"))))
    found.append(error_of(lambda: Communicator(WORLD, rails=Rails(RAILS, wire="pigeon"))))
    return found


def own_ports() -> list[tuple[str, int]]:
    """Return all addresses at which this process listens."""
    own = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)}
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    listening = [line[1].split(":") for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]
    return [(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in listening]


@case
def unauthenticated_at_every_port() -> list[int]:
    """Send garbage to every listening port, UCX's too, during communication."""
    before = set(own_ports())
    with make_comm(codec="none") as comm:
        ports = [port for port in own_ports() if port not in before]
        held, wrong = [], 0
        for number in range(5):
            for port in ports:
                with suppress(OSError):  # some are closed at once
                    held.append(socket.create_connection(port, timeout=5))
                    held[-1].sendall(
                        [os.urandom(1000), bytes(1000), b"\xff" * 8, b"GET / HTTP/1.1\r\n\r\n", b""][number]
                    )
            buffer = values(1_000_000, number if RANK == 0 else 99)
            comm.Bcast(buffer, 0)
            wrong += not np.array_equal(buffer, values(1_000_000, number))
        for connection in held:
            connection.close()
        return [wrong, len(comm.rail_stats().failovers), int(len(ports) > 2 * (WIRE == "ucx"))]


@case
def invalid_settings() -> list[str]:
    """Name missing devices, on one rank or on all."""
    return [
        error_of(lambda: Communicator(WORLD, rails="lo,nosuch0" if RANK == 1 else "lo,127.0.0.2")),
        error_of(lambda: Communicator(WORLD, rails="lo,127.0.0.2" if RANK == 1 else "lo")),
        error_of(lambda: Communicator(WORLD, rails="lo,lo")),
        error_of(lambda: Communicator(WORLD, rails=Rails("lo", timeout=0))),
    ]


@case
def dead_rank() -> list[str]:
    """Make rank 1 unreachable, as after a crash; return the errors of the others."""
    comm = make_comm()
    comm.Barrier()
    if RANK == 1:
        connections = comm._runtime.wire.connections
        with connections._loop.lock:
            connections._connector.close()
            connections._connector.connect_missing = lambda now: None
        for peer in (0, 2):
            for rail in (0, 1):
                core().gc_tcp_drop_path(connections.handle, peer, rail, b"the rank ends")
        return []
    errors = [error_of(lambda: comm.Bcast(np.zeros(1_000_000, np.float32), 0))]
    errors.append(error_of(lambda: comm.Allreduce(np.zeros(3), np.zeros(3))))
    return errors


@case
def hung_peer() -> list[object]:
    """Stop rank 1 for longer than the timeout while others wait for it: its paths stay alive."""
    with make_comm() as comm:
        pids = WORLD.allgather(os.getpid())
        comm.Barrier()
        buffer = values(4_000_000, 7 if RANK == 0 else 8)
        request = comm.Ibcast(buffer, 0)
        if RANK == 0:
            os.kill(pids[1], signal.SIGSTOP)
            time.sleep(1.5)
            os.kill(pids[1], signal.SIGCONT)
        request.Wait()
        rails = {comm._runtime.wire.rail(peer) for peer in range(SIZE) if peer != RANK}
        right = np.array_equal(buffer, values(4_000_000, 7))
        return [right, [tuple(one) for one in comm.rail_stats().failovers], sorted(rails)]


@case
def derived_communicators() -> list[object]:
    """Use duplicates and sub-communicators, which have their own rails."""
    found = []
    with make_comm() as comm, comm.Dup() as twin, comm.Split(RANK % 2) as part:
        for one in (comm, twin, part):
            total = np.zeros(3)
            one.Allreduce(np.ones(3), total)
            found.append([total.tolist(), one.rail_stats() is not None, one._settings.rails == comm._settings.rails])
    assert Communicator(WORLD, rails="").rail_stats() is None
    return found


def main(names: list[str]) -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    found = {name: CASES[name]() for name in names or CASES}
    results = WORLD.gather(found)
    if RANK == 0:
        print(json.dumps(results))
    sys.stdout.flush()
    WORLD.Barrier()
    if "dead_rank" in found:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[2:])
