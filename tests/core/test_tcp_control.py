"""The control side of the TCP wire: connecting, reconnecting, statistics, and the end of a peer."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import time
from pathlib import Path

import pytest
from launch import needs_mpirun, run
from tcp_programs import HERE, SHARED, TCP, compile_to
from tcp_rank import FAULT, PENDING, WireUser, run_threads

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.transport.rails import Rails
from mpi_gpucomp.transport.rails.connector import MAX_UNAUTHENTICATED, Hello, InitiatorHandshake

FAILOVER, STRIPED = "127.0.0.1,127.0.0.2", "127.0.0.1+127.0.0.2"


@pytest.fixture(scope="module")
def tcp_library_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = [HERE / "tcp_harness.cpp", *TCP]
    return compile_to(tmp_path_factory.mktemp("core") / "library.so", sources, SHARED)


@pytest.fixture(scope="module")
def tcp_library(tcp_library_path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(tcp_library_path))


def any_size(draw: random.Random) -> int:
    return draw.choice([0, 100, 20_000, 1_500_000])


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as made:
            made.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("rails", [Rails(FAILOVER, 0.3), Rails(STRIPED, 0.3), Rails("127.0.0.1", 0.3, stripes=2)])
def test_messages_arrive_while_paths_break(tcp_library: ctypes.CDLL, rails: Rails) -> None:
    def work(user: WireUser) -> tuple[int, bool, str]:
        with user.cutting(user.rank, 2):
            wrong = user.pass_ring(25, any_size)
        return wrong, any(one.reason == "cut by the test" for one in user.wire.failovers()), user.fault()

    assert run_threads(3, rails, tcp_library, work) == [(0, True, "")] * 3


def test_statistics(tcp_library: ctypes.CDLL) -> None:
    """Long messages are not copied; a short one is by its sender, and by a receiver that it finds without a receive."""

    def work(user: WireUser) -> list[object]:
        wrong = user.pass_ring(3, lambda draw: 100_000)
        peer = 1 - user.rank
        found: list[object] = [wrong, user.wire.rail(peer), user.wire.rail(user.rank), user.wire.down()]
        found += [user.wire.failovers(), user.wire.copies.nbytes]
        user.pass_ring(1, lambda draw: 100)
        return [*found, user.wire.copies.nbytes in (100, 200)]

    expected = [0, "127.0.0.1", "", [], [], 0, True]
    assert run_threads(2, Rails(FAILOVER), tcp_library, work) == [expected] * 2


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on the loopback device")
def test_ipv6(tcp_library: ctypes.CDLL) -> None:
    assert run_threads(2, Rails("::1"), tcp_library, lambda user: user.pass_ring(3, any_size)) == [0, 0]


def test_a_path_is_used_again_once_it_is_stable(tcp_library: ctypes.CDLL) -> None:
    def work(user: WireUser) -> object:
        first = user.wire.rail(1 - user.rank)
        if user.rank == 0:
            user.cut(1, 0)
        for _ in range(60):  # both ranks make the same number of rounds
            user.pass_ring(1, any_size)
            time.sleep(0.02)
        lost = [(one.rail, one.downtime is not None) for one in user.wire.failovers()]
        return first, user.wire.rail(1 - user.rank), lost

    expected = ("127.0.0.1", "127.0.0.1", [(0, True)])
    assert run_threads(2, Rails(FAILOVER, 0.2), tcp_library, work) == [expected] * 2


def test_a_rank_that_ends_is_a_fault_on_its_peers(tcp_library: ctypes.CDLL) -> None:
    def work(user: WireUser) -> object:
        user.pass_ring(1, any_size)
        if user.rank == 1:  # as after a crash: nothing listens, and no connection is left
            with user.wire._loop.lock:
                user.wire._connector.close()
                user.wire._connector.connect_missing = lambda now: None
            for path in (0, 1):
                user.cut(0, path)
            user.wait(user.receive(0, 5, ctypes.create_string_buffer(9)), 3)
            return None
        return user.wait(user.receive(1, 5, ctypes.create_string_buffer(9)), 20), user.fault()

    first, _ = run_threads(2, Rails(FAILOVER, 0.2, limit=3), tcp_library, work)
    assert first == (FAULT, "no path from rank 0 to rank 1: its ports refuse connections")


def test_unauthenticated_peers_are_rejected(tcp_library: ctypes.CDLL) -> None:
    def work(user: WireUser) -> list[object]:
        ports = [listener.getsockname() for listener in user.wire._connector._listeners]
        held = []
        for number in range(20):
            connection = socket.create_connection(ports[number % 2], timeout=5)
            held.append(connection)
            first = InitiatorHandshake(os.urandom(32), Hello(0, user.rank, number % 2, 1 << 20)).first
            connection.sendall([os.urandom(200), first, b"G", b""][number % 4])
        wrong = user.pass_ring(3, any_size)
        deadline = time.monotonic() + 20
        while user.wire._connector.has_pending and time.monotonic() < deadline:
            time.sleep(0.01)
        for connection in held:
            connection.close()
        return [wrong, user.wire._connector.has_pending, user.wire.failovers()]

    assert run_threads(2, Rails(FAILOVER), tcp_library, work) == [[0, False, []]] * 2


def test_strangers_that_hold_every_place_do_not_keep_a_peer_out(tcp_library: ctypes.CDLL) -> None:
    def work(user: WireUser) -> list[object]:
        connector = user.wire._connector
        connector.handshake_timeout = 1000.0  # the strangers stay
        held = [socket.create_connection(connector._listeners[0].getsockname(), timeout=5) for _ in range(150)]
        user.pass_ring(1, any_size)
        if user.rank == 0:
            user.cut(1, 0)
        wrong = user.pass_ring(3, any_size)
        pending = len(connector._pending)
        for connection in held:
            connection.close()
        return [wrong, user.fault(), pending <= MAX_UNAUTHENTICATED + 2]

    settings = Rails("127.0.0.1", 0.3, limit=10)
    assert run_threads(2, settings, tcp_library, work) == [[0, "", True]] * 2


def test_nothing_arrives_without_a_send(tcp_library: ctypes.CDLL) -> None:
    def work(user: WireUser) -> int:
        return user.wait(user.receive(1 - user.rank, 5, ctypes.create_string_buffer(9)), 0.05)

    assert run_threads(2, Rails(FAILOVER), tcp_library, work) == [PENDING] * 2


def test_a_device_that_is_missing_is_an_error(tcp_library: ctypes.CDLL) -> None:
    for rank, error in enumerate(run_threads(2, Rails("nosuch0"), tcp_library, lambda user: None)):
        assert isinstance(error, SpecError)
        assert str(error).startswith(f"rank {rank}: rails: expected devices that every rank has, got rank 0: rails: ")


@needs_mpirun
def test_ranks_of_mpi(tcp_library_path: Path) -> None:
    done = run(3, "tests/core/tcp_rank.py", str(tcp_library_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[(0, True, '')] * 3} True\n"
