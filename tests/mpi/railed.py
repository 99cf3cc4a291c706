"""Run under mpirun: rails on two loopback addresses, whose paths break while everything else goes on.

railed.py RAILS [CASE...]    the first rank prints what all ranks have found in each case
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
from mpi_gpucomp.monitor.chrome_trace import trace
from mpi_gpucomp.trace import RECV, SEND
from mpi_gpucomp.transport.rails import Rails
from mpi_gpucomp.transport.rails.connector import Dialling, Hello

WORLD = MPI.COMM_WORLD
WIRE = os.environ.get("MPI_GPUCOMP_RAIL_WIRE", "tcp")
RANK, SIZE = WORLD.rank, WORLD.size
NEXT, BEFORE = (RANK + 1) % SIZE, (RANK - 1) % SIZE
RAILS = sys.argv[1]
MOST_CUTS = 40
CALLS: dict[str, Callable[[], object]] = {}


def case(function: Callable[[], object]) -> Callable[[], object]:
    CALLS[function.__name__] = function
    return function


def made(limit: float = 30.0, **options: object) -> Communicator:
    return Communicator(WORLD, rails=Rails(RAILS, 0.3, limit, WIRE), **options)


def heard(work: Callable[[], object]) -> str:
    try:
        work()
        return "no error"
    except GpucompError as error:
        return f"{type(error).__name__}: {error}"


def cut(comm: Communicator, peer: int, rail: int) -> bool:
    """Break a path from inside, in whatever it is doing: half a frame may be on its way."""
    transport = comm._caller.transport
    with transport._loop.held(), suppress(OSError):  # the peer may have cut it at the same time
        path = transport._links[peer].paths.get(rail)
        if path is None:
            return False
        if WIRE == "tcp":
            path._socket.shutdown(socket.SHUT_RDWR)
        elif path.key.generation % 2:
            path._beside.shutdown(socket.SHUT_RDWR)
        else:
            transport._links[peer].down(path, "cut by the test")
    return True


@contextmanager
def cutting(comm: Communicator, seed: int) -> Iterator[list[int]]:
    """Break one path after the other meanwhile, at random moments, and count them."""
    ended, cuts, draw = threading.Event(), [0], random.Random(seed)

    def run() -> None:
        while not ended.wait(draw.uniform(0, 0.03 if WIRE == "tcp" else 0.3)):  # a path over UCX takes a while to make
            peer = draw.choice([peer for peer in range(SIZE) if peer != RANK])
            cuts[0] += cut(comm, peer, draw.randrange(2))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield cuts
    finally:
        ended.set()
        thread.join()


def turns(comm: Communicator, cuts: list[int]) -> Iterator[int]:
    """Go on until there have been enough cuts on all ranks together."""
    total, turn = np.zeros(1), 0
    while total[0] < MOST_CUTS:
        yield turn
        turn += 1
        comm.Allreduce(np.array([float(cuts[0])]), total)


def values(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1000, 1000, count).astype(np.float32)


@case
def collectives_under_cuts() -> int:
    """Broadcast, reduce and exchange while paths break; every element is right every time."""
    wrong = 0
    with made(codec="none", chunk=200_000) as comm, cutting(comm, RANK) as cuts:
        for turn in turns(comm, cuts):
            buffer = values(700_001, turn)
            expected = buffer.copy()
            if turn % SIZE != RANK:
                buffer[:] = 0
            comm.Bcast(buffer, turn % SIZE)
            wrong += not np.array_equal(buffer, expected)
            total = np.zeros(300_007, np.float32)
            comm.Allreduce(values(300_007, RANK + turn), total, codec="split" if turn % 2 else None)
            wrong += not np.array_equal(total, sum(values(300_007, rank + turn) for rank in range(SIZE)))
            comm.Barrier()
    return int(wrong)


@case
def messages_under_cuts() -> int:
    """Pass long and short messages round a ring while paths break."""
    wrong = 0
    with made() as comm, cutting(comm, 100 + RANK) as cuts:
        for turn in turns(comm, cuts):
            sent, room = values(2_000_003, RANK + turn), np.zeros(2_000_005, np.float32)
            status = MPI.Status()
            comm.Sendrecv(sent, NEXT, turn, room, BEFORE, turn, status)
            wrong += not np.array_equal(room[:-2], values(2_000_003, BEFORE + turn)) or bool(room[-2:].any())
            wrong += (status.source, status.tag, status.Get_count(MPI.FLOAT)) != (BEFORE, turn, sent.size)
            for small in range(20):
                comm.Isend(np.full(10, small, np.int32), NEXT, 99)
            got = np.zeros(10, np.int32)
            for small in range(20):
                comm.Recv(got, MPI.ANY_SOURCE, 99)
                wrong += bool((got != small).any())
            comm.Barrier()  # or a fast neighbour's next ones would be among them
    return int(wrong)


@case
def both_ways_at_once() -> int:
    """Cut both paths to a peer at the same time: what was on its way goes on over the next that is made."""
    with made() as comm:
        sent, room = values(5_000_000, RANK), np.zeros(5_000_000, np.float32)
        requests = [comm.Irecv(room, BEFORE, 3), comm.Isend(sent, NEXT, 3)]
        for rail in (0, 1):
            cut(comm, NEXT, rail)
        for request in requests:
            request.Wait()
        lost = {(one.peer, one.rail) for one in comm.rail_stats().failovers}
        assert {(NEXT, 0), (NEXT, 1)} <= lost, lost
        return int((room != values(5_000_000, BEFORE)).sum())


@case
def no_copies() -> list[int]:
    """Count the copies of long messages between host buffers: there are none, with gaps or without on the way."""
    with made(codec="none") as comm:
        comm.Barrier()
        before = comm.rail_stats().copies
        room = np.zeros(16_000_000, np.float32)
        comm.Sendrecv(np.ones(16_000_000, np.float32), NEXT, 3, room, BEFORE, 3)
        assert room.all()
        comm.Bcast(room, 0)
        after = comm.rail_stats().copies
    return [after.nbytes - before.nbytes, int(comm.stats().bytes_sent > 0)]


def rest(connection: socket.socket) -> bytes:
    """Return what a stranger hears before it is turned away."""
    with connection:
        try:
            return connection.recv(1000)
        except ConnectionResetError:
            return b""


@case
def strangers() -> list[str]:
    """Let strangers knock, talk nonsense, know no secret, or say nothing; nobody is disturbed."""
    with made() as comm:
        transport = comm._caller.transport
        doors = transport._doors
        ports = [listener.getsockname() for listener in doors._listeners]
        held = []
        for number in range(30):
            connection = socket.create_connection(ports[number % 2], timeout=5)
            held.append(connection)
            hello = Hello(0, RANK, number % 2, 1 << 20)
            talk = [os.urandom(200), Dialling(os.urandom(32), hello).first, b"G", b"GET / HTTP/1.1\r\n\r\n", b""]
            connection.sendall(talk[number % 5])
            if number % 5 == 1 and RANK > 0:
                answer = connection.recv(1000)
                assert len(answer) == 64
                connection.sendall(bytes(32))
                assert connection.recv(1000) == b""
        buffer = values(100_000, 3 if RANK == 0 else 4)
        comm.Bcast(buffer, 0)
        assert np.array_equal(buffer, values(100_000, 3))
        until = time.monotonic() + 20
        while doors._meetings and time.monotonic() < until:
            time.sleep(0.01)
        left = len(doors._meetings)
        said = [rest(connection) for number, connection in enumerate(held) if number % 5 != 1]
        return [f"{left} left", f"{sum(map(bool, said))} heard anything", f"{len(comm.rail_stats().failovers)} cuts"]


@case
def records_name_the_rail() -> list[list[int]]:
    """Send over the first rail and, once that is cut, over the second: the monitor's records say which it was."""
    found = []
    with made(codec="none") as comm:
        comm.Barrier()
        box = comm._caller.station.box
        for _ in range(2):
            before = len(box.records())
            room = np.zeros(1_000_000, np.float32)
            comm.Sendrecv(values(1_000_000, RANK), NEXT, 3, room, BEFORE, 3)
            assert np.array_equal(room, values(1_000_000, BEFORE))
            some = box.records()[before:]
            found.append(
                sorted({(int(one["kind"] == SEND), int(one["rail"])) for one in some if one["kind"] in (SEND, RECV)})
            )
            comm.Barrier()
            for peer in {NEXT, BEFORE}:
                cut(comm, peer, 0)
        assert {one["args"]["rail"] for one in trace([box])["traceEvents"] if "rail" in one.get("args", ())} == {0, 1}
    return found


@case
def unlike_wires() -> list[str]:
    """Ask for UCX where one rank does not have it, and for what others do not ask for."""
    if RANK == 1:
        sys.modules["ucxx"] = None  # as if it were not installed
    said = [heard(lambda: Communicator(WORLD, rails=Rails(RAILS, wire="ucx")))]
    with Communicator(WORLD, rails=Rails(RAILS, wire="auto")) as comm:
        said += [type(wire).__name__ for wire in comm._caller.transport._doors._wires]
    said.append(heard(lambda: Communicator(WORLD, rails=Rails(RAILS, wire="auto" if RANK == 1 else "tcp"))))
    said.append(heard(lambda: Communicator(WORLD, rails=Rails(RAILS, wire="pigeon"))))
    return said


def own_ports() -> list[tuple[str, int]]:
    """Return the addresses at which this process listens, whoever has opened them."""
    own = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)}
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    listening = [line[1].split(":") for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]
    return [(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in listening]


@case
def strangers_at_every_port() -> list[int]:
    """Let strangers talk nonsense to whatever listens, UCX's own ports too, while messages pass."""
    before = set(own_ports())
    with made(codec="none") as comm:
        ports = [port for port in own_ports() if port not in before]
        held, wrong = [], 0
        for turn in range(5):
            for port in ports:
                with suppress(OSError):  # some are turned away at once
                    held.append(socket.create_connection(port, timeout=5))
                    held[-1].sendall([os.urandom(1000), bytes(1000), b"\xff" * 8, b"GET / HTTP/1.1\r\n\r\n", b""][turn])
            buffer = values(1_000_000, turn if RANK == 0 else 99)
            comm.Bcast(buffer, 0)
            wrong += not np.array_equal(buffer, values(1_000_000, turn))
        for connection in held:
            connection.close()
        return [wrong, len(comm.rail_stats().failovers), int(len(ports) > 2 * (WIRE == "ucx"))]


@case
def wrong_settings() -> list[str]:
    """Name what is not there, on one rank or on all."""
    return [
        heard(lambda: Communicator(WORLD, rails="lo,nosuch0" if RANK == 1 else "lo,127.0.0.2")),
        heard(lambda: Communicator(WORLD, rails="lo,127.0.0.2" if RANK == 1 else "lo")),
        heard(lambda: Communicator(WORLD, rails="lo,lo")),
        heard(lambda: Communicator(WORLD, rails=Rails("lo", timeout=0))),
    ]


@case
def a_rank_that_is_gone() -> list[str]:
    """Let rank 1 be unreachable, as after a crash: all others hear that it is."""
    comm = made()
    comm.Barrier()
    if RANK == 1:
        with comm._caller.transport._loop.held():
            comm._caller.transport._doors.close()
            for link in comm._caller.transport._links.values():
                link.close()
        return []
    said = [heard(lambda: comm.Bcast(np.zeros(1_000_000, np.float32), 0))]
    said.append(heard(lambda: comm.Allreduce(np.zeros(3), np.zeros(3))))
    return said


@case
def a_peer_that_stands_still() -> list[object]:
    """Stop rank 1 for longer than the timeout while others wait for it: it is idle, its paths are not dead."""
    with made() as comm:
        pids = WORLD.allgather(os.getpid())
        comm.Barrier()
        buffer = values(4_000_000, 7 if RANK == 0 else 8)
        request = comm.Ibcast(buffer, 0)
        if RANK == 0:
            os.kill(pids[1], signal.SIGSTOP)
            time.sleep(1.5)
            os.kill(pids[1], signal.SIGCONT)
        request.Wait()
        rails = {comm._caller.transport.rail(peer) for peer in range(SIZE) if peer != RANK}
        right = np.array_equal(buffer, values(4_000_000, 7))
        return [right, [tuple(one) for one in comm.rail_stats().failovers], sorted(rails)]


@case
def settings_are_passed_on() -> list[object]:
    """Duplicates and parts have rails of their own."""
    found = []
    with made() as comm, comm.Dup() as twin, comm.Split(RANK % 2) as part:
        for one in (comm, twin, part):
            total = np.zeros(3)
            one.Allreduce(np.ones(3), total)
            found.append([total.tolist(), one.rail_stats() is not None, one._settings.rails == comm._settings.rails])
    assert Communicator(WORLD, rails="").rail_stats() is None
    return found


def main(names: list[str]) -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    told = {name: CALLS[name]() for name in names or CALLS}
    everybody = WORLD.gather(told)
    if RANK == 0:
        print(json.dumps(everybody))
    sys.stdout.flush()
    WORLD.Barrier()
    if "a_rank_that_is_gone" in told:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[2:])
