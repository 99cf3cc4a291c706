"""Run under mpirun: messages from rank to rank, in frames and by MPI's own, against what mpi4py itself receives.

Each rank passes a message to the next one and receives one of the rank before, so that a program runs on any number of
ranks; what a case finds on each rank is printed by the first.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator, GpucompError, Request
from mpi_gpucomp.codec import register
from mpi_gpucomp.codec.raw import Raw
from mpi_gpucomp.device import get_device

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
NEXT, BEFORE = (RANK + 1) % SIZE, (RANK - 1) % SIZE
CHUNK = 1 << 14
CALLS: dict[str, Callable[[], object]] = {}


def case(function: Callable[[], object]) -> Callable[[], object]:
    CALLS[function.__name__] = function
    return function


def values(count: int, dtype: str, seed: int = RANK) -> np.ndarray:
    random = np.random.default_rng(seed)
    if dtype.startswith("f"):
        return random.normal(0, 0.02, count).astype(dtype)
    return random.integers(0, 2 if dtype == "?" else 100, count).astype(dtype)


def said(status: MPI.Status) -> tuple[int, ...]:
    return status.source, status.tag, status.Get_count(MPI.BYTE), status.Is_cancelled()


def heard(work: Callable[[], object]) -> str:
    try:
        work()
        return "no error"
    except (GpucompError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def blocking(comm: Communicator, sent: np.ndarray, room: np.ndarray, tag: int, **options: object) -> MPI.Status:
    """Let one rank send first, or they would wait in a circle."""
    status, codec = MPI.Status(), {key: value for key, value in options.items() if key == "codec"}
    if RANK == 0:
        comm.Send(sent, NEXT, tag, **options)
    comm.Recv(room, BEFORE, tag, status, **codec)
    if RANK > 0:
        comm.Send(sent, NEXT, tag, **options)
    return status


def started(comm: Communicator, sent: np.ndarray, room: np.ndarray, tag: int, **options: object) -> MPI.Status:
    status, codec = MPI.Status(), {key: value for key, value in options.items() if key == "codec"}
    requests = [comm.Irecv(room, BEFORE, tag, **codec), comm.Isend(sent, NEXT, tag, **options)]
    requests[0].Wait(status)
    assert Request.Waitall(requests)
    return status


def exchanged(comm: Communicator, sent: np.ndarray, room: np.ndarray, tag: int, **options: object) -> MPI.Status:
    status = MPI.Status()
    comm.Sendrecv(sent, NEXT, tag, room, BEFORE, tag, status, **options)
    return status


def compare(comm: Communicator, count: int, dtype: str, **options: object) -> None:
    """Pass a message on in every way, with two elements too much room, and compare data and status with mpi4py's."""
    sent, expected = values(count, dtype), np.ones(count + 2, dtype)
    status = MPI.Status()
    WORLD.Sendrecv(sent, NEXT, 5, expected, BEFORE, 5, status)
    for way in (blocking, started, exchanged)[SIZE == 1 :]:  # a rank alone waits for itself for ever
        received = np.ones(count + 2, dtype)
        got = way(comm, sent, received, 5, **options)
        what = f"{way.__name__}, {count} x {dtype}, {options}"
        assert received.tobytes() == expected.tobytes(), what
        assert said(got) == said(status), what


@case
def sizes() -> None:
    with Communicator(WORLD, codec="split", chunk=CHUNK, passthrough_bytes=0) as comm:
        for dtype in ("f4", "f8", "i4", "?", "u1"):
            chunk = CHUNK // np.dtype(dtype).itemsize
            for count in (0, 1, 3, chunk - 1, chunk, chunk + 1, 5 * chunk + 7):
                compare(comm, count, dtype)


@case
def long_ones() -> None:
    with Communicator(WORLD, codec="split") as comm:
        for count in (8191, 8192, 8193, 1_500_001):
            compare(comm, count, "f4")
        compare(comm, 300_000, "f8", chunk=100_003)


@case
def one_call() -> None:
    """Name the codec on the calls, of a communicator that has none, or whose own leaves messages to MPI."""
    for codec in ("none", "auto"):
        with Communicator(WORLD, codec=codec, chunk=CHUNK) as comm:
            compare(comm, 50_000, "f4")
            compare(comm, 50_000, "f4", codec="mpc", chunk=70_000)
            compare(comm, 50_000, "f4", codec="auto")
            compare(comm, 10, "f4", codec="split")
    with Communicator(WORLD, codec="mpc", chunk=CHUNK) as comm:
        compare(comm, 50_000, "f4", codec="none")


@case
def any_codec() -> None:
    """Let the receiver name another codec than the sender, and no chunk."""
    with Communicator(WORLD) as comm:
        sent, room = values(50_000, "f4"), np.zeros(50_000, "f4")
        request = comm.Isend(sent, NEXT, codec="split", chunk=10_000)
        comm.Recv(room, BEFORE, codec="mpc")
        request.Wait()
    assert (room == values(50_000, "f4", BEFORE)).all()


@case
def lossy() -> None:
    with Communicator(WORLD, codec="bound:abs=1e-3", chunk=CHUNK) as comm:
        room = np.zeros(100_000, "f4")
        exchanged(comm, values(100_000, "f4"), room, 1)
    error = np.abs(room - values(100_000, "f4", BEFORE)).max()
    assert 0 < error <= 1e-3, error


@case
def anyone() -> None:
    """Receive from any rank with any tag: each sender's messages come in its order, none is lost or mixed."""
    counts = [3, 50_000, 0, 20_001, 7, 4096]
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        requests = [comm.Isend(np.full(n, RANK + i, "f4"), 0, i % 2) for i, n in enumerate(counts)]
        seen: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(SIZE)}
        for _ in range(SIZE * len(counts) if RANK == 0 else 0):
            room, status = np.zeros(50_000, "f4"), MPI.Status()
            comm.Recv(room, status=status)
            count = status.Get_count(MPI.FLOAT)
            seen[status.source].append((count, status.tag))
            assert (room[:count] == status.source + counts.index(count)).all()
        Request.Waitall(requests)
    if RANK == 0:
        assert all(got == [(n, i % 2) for i, n in enumerate(counts)] for got in seen.values()), seen


@case
def in_order() -> None:
    """Start several messages with the same tag, long and short, and wait for them from the last to the first."""
    counts = [40_000, 5, 60_000, 60_000, 0, 9_000]
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        rooms = [np.zeros(60_000, "f4") for _ in counts]
        # MPI matches receives in the order of their calls, also where one names less than another.
        receives = [comm.Irecv(room, *((BEFORE, 3) if i % 2 else ())) for i, room in enumerate(rooms)]
        WORLD.Barrier()
        sends = [comm.Isend(np.full(n, i + 1, "f4"), NEXT, 3) for i, n in enumerate(counts)]
        for request in reversed(receives):
            request.Wait()
        Request.Waitall(sends)
    for i, (room, n) in enumerate(zip(rooms, counts, strict=True)):
        assert (room[:n] == i + 1).all() and not room[n:].any()


@case
def by_looking() -> None:
    """Get there by Test alone, and by Waitany; besides, a collective goes on."""
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        total, room, status = np.ones(100_000, "f4"), np.zeros(100_000, "f4"), MPI.Status()
        summed = comm.Iallreduce(MPI.IN_PLACE, total)
        receive, send = comm.Irecv(room, tag=9), comm.Isend(values(100_000, "f4"), NEXT, 9)
        while not receive.Test(status):
            pass
        while not Request.Testall([send, summed, receive]):
            pass
        assert said(status) == (BEFORE, 9, 400_000, False)
        assert (room == values(100_000, "f4", BEFORE)).all() and (total == SIZE).all()
        never, send = comm.Irecv(np.zeros(1, "f4"), tag=77), comm.Isend(room, NEXT, 8)
        receive = comm.Irecv(room, tag=8)
        assert Request.Waitany([never, receive]) == 1
        send.Wait()
        never.Cancel()
        never.Wait(status)
        assert status.Is_cancelled()


@case
def gaps() -> None:
    """Send every second element, receive in every third; what lies between stays as it is."""
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        for codec in ("split", "none"):
            for count in (10, 20_000):
                sent, room = values(2 * count, "f4"), np.full((count + 5, 3), 7, "f4")
                request = comm.Isend(sent[::2], NEXT, codec=codec)
                comm.Recv(room[:, 1], BEFORE, codec=codec)
                request.Wait()
                assert (room[:count, 1] == values(2 * count, "f4", BEFORE)[::2]).all()
                assert (room[:, (0, 2)] == 7).all() and (room[count:] == 7).all()


@case
def forms() -> None:
    """Take mpi4py's lists, bytes, and half floats that mpi4py does not know."""
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        for codec in ("split", "none"):
            sent, room, status = values(30_000, "f8"), np.zeros(30_000, "f8"), MPI.Status()
            request = comm.Isend([sent, (20_000, 100), MPI.DOUBLE], NEXT, codec=codec)
            comm.Recv([room, 25_000, "d"], BEFORE, status=status, codec=codec)
            request.Wait()
            assert (room[:20_000] == values(30_000, "f8", BEFORE)[100:20_100]).all() and not room[20_000:].any()
            assert status.Get_count(MPI.DOUBLE) == 20_000
            half = np.zeros(3, "f2")
            comm.Sendrecv(np.full(3, RANK, "f2"), NEXT, 0, half, BEFORE, codec=codec)
            assert (half == BEFORE).all()
        some = bytearray(100_000)
        comm.Sendrecv(bytes([RANK + 1]) * 100_000, NEXT, 0, some, BEFORE)
        assert some == bytes([BEFORE + 1]) * 100_000


@case
def nobody() -> None:
    """Send to nobody and receive from nobody, as mpi4py does."""
    with Communicator(WORLD, codec="split") as comm:
        room, ours, theirs = np.ones(50_000, "f4"), MPI.Status(), MPI.Status()
        comm.Send(room, MPI.PROC_NULL)
        for mine, status in ((comm, ours), (WORLD, theirs)):
            mine.Recv(room, MPI.PROC_NULL, 3, status)
            assert mine.Irecv(room, MPI.PROC_NULL).Wait() is not False
        assert said(ours) == said(theirs) and (room == 1).all()
        comm.Sendrecv(room, MPI.PROC_NULL, 0, room, MPI.PROC_NULL)
        # At the ends of a line of ranks.
        up, down = (RANK + 1 if RANK + 1 < SIZE else MPI.PROC_NULL), (RANK - 1 if RANK else MPI.PROC_NULL)
        comm.Sendrecv(np.full(50_000, RANK, "f4"), up, 0, room, down)
        assert (room == (RANK - 1 if RANK else 1)).all()


@case
def too_long() -> list[str]:
    told = []
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        for count in (10, 100_000):
            request, status = comm.Isend(np.ones(count, "f4"), NEXT, 4), MPI.Status()
            told.append(heard(lambda count=count, to=status: comm.Recv(np.ones(count - 1, "f4"), BEFORE, 4, to)))
            request.Wait()
            assert said(status) == (BEFORE, 4, 4 * count, False)
        compare(comm, 30_000, "f4")
    return told


@case
def wrong_type() -> list[str]:
    told = []
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        for count in (10, 100_000):
            request = comm.Isend(np.ones(count, "f4"), NEXT, 4)
            told.append(heard(lambda count=count: comm.Recv(np.ones(count, "i4"), BEFORE)))
            request.Wait()
        pair = MPI.FLOAT.Create_vector(2, 1, 2).Commit()
        told.append(heard(lambda: comm.Send([np.ones(4, "f4"), 1, pair], NEXT)))
        pair.Free()
        told.append(heard(lambda: comm.Send(np.ones(4, "i4"), NEXT, codec="split")))
        compare(comm, 30_000, "f4")
    return told


class Failing(Raw):
    """Fails on rank 0 at a chunk, as it is queued or (late) in its stream."""

    name, wire_id = "failing", 0xF0020000

    def __init__(self, side: str, late: str) -> None:
        self.side, self.late, self.count = side, late == "1", 0

    @property
    def spec(self) -> str:
        return f"failing:side={self.side},late={int(self.late)}"

    def encode(self, source: object, to: object, stream: object) -> object:
        self._maybe("encode", stream)
        return super().encode(source, to, stream)

    def decode_reduce(self, source: object, nbytes: int, to: object, op: str, stream: object) -> object:
        self._maybe("decode", stream)
        return super().decode_reduce(source, nbytes, to, op, stream)

    def _maybe(self, side: str, stream: object) -> None:
        self.count += RANK == 0 and side == self.side
        if self.count == 3:
            self.count += 1
            stream.run(self._fail) if self.late else self._fail()

    def _fail(self) -> None:
        raise OSError("no more")


@case
def failing() -> list[str]:
    register("failing", lambda parameters: Failing(**parameters), "tests")
    told = []
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        for side in ("encode", "decode"):
            for late in (0, 1):
                # With chunks of this size the stream has a thread.
                options = {"codec": f"failing:side={side},late={late}", "chunk": (1 << 16) + late}
                request = comm.Isend(np.ones(200_000, "f4"), NEXT, 6, **options)
                told.append(heard(lambda: comm.Recv(np.ones(200_000, "f4"), BEFORE, codec="split")))
                told.append(heard(request.Wait))
                compare(comm, 30_000, "f4")
    return told


@case
def memory() -> None:
    """Hold no more than three frames of a long message, and nothing when it is over."""
    pool, chunk = get_device("host").pool, 1 << 18
    with Communicator(WORLD, codec="split", chunk=chunk) as comm:
        exchanged(comm, np.ones(1), np.ones(1), 0)
        pool.trim()
        before = pool.statistics
        exchanged(comm, values(4_000_000, "f4"), np.ones(4_000_000, "f4"), 0)
        after = pool.statistics
    assert after.in_use == before.in_use, (before, after)
    # Three frames each way, and what the codec itself works with.
    assert after.retained <= 12 * chunk, after


@case
def freed() -> None:
    """Leave no communicator and no thread behind."""
    before = threading.active_count()
    comm = Communicator(WORLD, codec="split")
    compare(comm, 100_000, "f4")
    assert threading.active_count() > before
    comm.Free()
    assert getattr(comm._p2p._line.firsts, "_comm", MPI.COMM_NULL) == MPI.COMM_NULL
    assert threading.active_count() == before


def main(names: list[str]) -> None:
    told = {name: CALLS[name]() for name in names or CALLS}
    everybody = WORLD.gather(told)
    if RANK == 0:
        assert all(list(one) == list(other) for one, other in pairwise(everybody))
        print(json.dumps(everybody))


if __name__ == "__main__":
    main(sys.argv[1:])
