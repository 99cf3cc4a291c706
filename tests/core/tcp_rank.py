"""A rank with a TCP wire, for tests: in a thread of this process, or under mpirun.

tcp_rank.py LIBRARY    under mpirun: pass messages around a ring while paths break; rank 0 prints the failures
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpi_gpucomp.transport.bootstrap import Bootstrap
from mpi_gpucomp.transport.rails import Rails
from mpi_gpucomp.transport.rails.connections import TcpConnections

SECONDS = 60
FAILED, FAULT, PENDING = -1, -2, -3


class ThreadGroup:
    """Ranks in threads of one process."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier, self._data = size, threading.Barrier(size), [b""] * size

    def allgather(self, rank: int, data: bytes) -> list[bytes]:
        self._data[rank] = data
        self._barrier.wait(SECONDS)
        found = list(self._data)
        self._barrier.wait(SECONDS)
        return found


class ThreadBootstrap:
    """One of these ranks."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group, self.rank, self.size = group, rank, group.size

    def allgather(self, data: bytes) -> list[bytes]:
        return self._group.allgather(self.rank, data)


class WireUser:
    """Sends and receives."""

    def __init__(self, bootstrap: Bootstrap, settings: Rails, library: ctypes.CDLL) -> None:
        pointer, wide = ctypes.c_void_p, ctypes.c_int64
        for name in ("harness_send", "harness_receive"):
            getattr(library, name).argtypes = [pointer, ctypes.c_int32, wide, pointer, wide]
            getattr(library, name).restype = pointer
        library.harness_wait.argtypes, library.harness_wait.restype = [pointer, pointer, wide], wide
        library.harness_fault.argtypes, library.harness_fault.restype = [pointer], ctypes.c_char_p
        self.wire, self.library = TcpConnections(bootstrap, settings, library), library
        self.rank, self.size = bootstrap.rank, bootstrap.size

    def send(self, peer: int, tag: int, data: ctypes.Array[ctypes.c_char]) -> int:
        found: int = self.library.harness_send(self.wire.handle, peer, tag, data, len(data))
        return found

    def receive(self, peer: int, tag: int, memory: ctypes.Array[ctypes.c_char]) -> int:
        found: int = self.library.harness_receive(self.wire.handle, peer, tag, memory, len(memory))
        return found

    def wait(self, transfer: int, seconds: float = SECONDS) -> int:
        found: int = self.library.harness_wait(self.wire.handle, transfer, int(seconds * 1e9))
        return found

    def fault(self) -> str:
        found: bytes = self.library.harness_fault(self.wire.handle)
        return found.decode()

    def cut(self, peer: int, path: int) -> None:
        self.library.gc_tcp_drop_path(self.wire.handle, peer, path, b"cut by the test")

    @contextmanager
    def cutting(self, seed: int, paths: int) -> Iterator[None]:
        """Break random paths at random times in a thread."""
        ended, draw = threading.Event(), random.Random(seed)

        def run() -> None:
            while not ended.wait(draw.uniform(0, 0.03)):
                self.cut(draw.choice([peer for peer in range(self.size) if peer != self.rank]), draw.randrange(paths))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def pass_ring(self, rounds: int, sizes: Callable[[random.Random], int]) -> int:
        """Pass messages around a ring; return the number of wrong ones."""
        wrong, following, preceding = 0, (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for number in range(rounds):
            draw = random.Random(number)
            sizes_of = [sizes(draw) for _ in range(self.size)]
            seeds = [random.Random(100 * number + rank) for rank in range(self.size)]
            data = ctypes.create_string_buffer(seeds[self.rank].randbytes(sizes_of[self.rank]), sizes_of[self.rank])
            memory = ctypes.create_string_buffer(sizes_of[preceding] + 5)
            receiving = self.receive(preceding, number, memory)
            sending = self.send(following, number, data)
            expected = seeds[preceding].randbytes(sizes_of[preceding])
            wrong += self.wait(receiving) != len(expected) or memory.raw[:-5] != expected
            wrong += self.wait(sending) != len(data)
        return wrong


def run_threads(size: int, settings: Rails, library: ctypes.CDLL, work: Callable[[WireUser], object]) -> list[object]:
    """Run ranks in threads; return their results, or what they raised."""
    group, results = ThreadGroup(size), [None] * size  # type: tuple[ThreadGroup, list[object]]

    def run(rank: int) -> None:
        try:
            user = WireUser(ThreadBootstrap(group, rank), settings, library)
            results[rank] = work(user)
            user.wire.close()
            user.wire.free()
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
        assert not thread.is_alive(), "timed out"
    return results


def main(path: str) -> None:
    from mpi4py import MPI

    from mpi_gpucomp.transport.bootstrap import MpiBootstrap

    settings = Rails("127.0.0.1,127.0.0.2", 0.3)
    user = WireUser(MpiBootstrap(MPI.COMM_WORLD), settings, ctypes.CDLL(path))
    started = time.monotonic()
    with user.cutting(user.rank, 2):
        wrong = user.pass_ring(40, lambda draw: draw.choice([100, 20_000, 3_000_000]))
    found = MPI.COMM_WORLD.gather((wrong, len(user.wire.failovers()) > 0, user.fault()))
    user.wire.close()
    user.wire.free()
    if user.rank == 0:
        print(found, time.monotonic() - started < SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
