"""Run under mpirun: point-to-point messages, framed and passed through, compared with mpi4py.

Each rank sends to the next rank and receives from the previous one, so that every case runs on any number of ranks.
Rank 0 prints the results of all ranks.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from itertools import count, pairwise

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
NUMBERS = count()
CALLS: dict[str, Callable[[], object]] = {}


def case(function: Callable[[], object]) -> Callable[[], object]:
    CALLS[function.__name__] = function
    return function


def mixed_case(function: Callable[[], object]) -> Callable[[], object]:
    """Register a case in which frames and mpi4py's other calls meet, which they do not on rails."""
    return function if os.environ.get("MPI_GPUCOMP_RAILS") else case(function)


def values(count: int, dtype: str, seed: int = RANK) -> np.ndarray:
    random = np.random.default_rng(seed)
    if dtype.startswith("f"):
        return random.normal(0, 0.02, count).astype(dtype)
    return random.integers(0, 2 if dtype == "?" else 100, count).astype(dtype)


def fields(status: MPI.Status) -> tuple[int, ...]:
    return status.source, status.tag, status.Get_count(MPI.BYTE), status.Is_cancelled()


def error_of(work: Callable[[], object]) -> str:
    try:
        work()
        return "no error"
    except (GpucompError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def blocking(comm: Communicator, sent: np.ndarray, room: np.ndarray, tag: int, **options: object) -> MPI.Status:
    """Send first on one rank: otherwise the ranks deadlock."""
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
    """Send by every method, with room for two more elements, and compare data and status with mpi4py."""
    sent, expected = values(count, dtype), np.ones(count + 2, dtype)
    status = MPI.Status()
    WORLD.Sendrecv(sent, NEXT, 5, expected, BEFORE, 5, status)
    for method in (blocking, started, exchanged)[SIZE == 1 :]:  # one rank alone would deadlock in Send
        received = np.ones(count + 2, dtype)
        got = method(comm, sent, received, 5, **options)
        what = f"{method.__name__}, {count} x {dtype}, {options}"
        assert received.tobytes() == expected.tobytes(), what
        assert fields(got) == fields(status), what


@case
def sizes() -> None:
    with Communicator(WORLD, codec="split", chunk=CHUNK, passthrough_bytes=0) as comm:
        for dtype in ("f4", "f8", "i4", "?", "u1"):
            chunk = CHUNK // np.dtype(dtype).itemsize
            for count in (0, 1, 3, chunk - 1, chunk, chunk + 1, 5 * chunk + 7):
                compare(comm, count, dtype)


@case
def long_messages() -> None:
    with Communicator(WORLD, codec="split") as comm:
        for count in (8191, 8192, 8193, 1_500_001):
            compare(comm, count, "f4")
        compare(comm, 300_000, "f8", chunk=100_003)


@case
def codec_of_a_call() -> None:
    """Pass codec= on calls of communicators with another codec, or none."""
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
    """Receive with another codec= than the sender's, and without chunk=."""
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
def any_source() -> None:
    """Receive from any source with any tag: messages of each sender arrive in order and complete."""
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
    """Start several messages with one tag, long and short, and wait for them in reverse."""
    counts = [40_000, 5, 60_000, 60_000, 0, 9_000]
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        rooms = [np.zeros(60_000, "f4") for _ in counts]
        # MPI matches receives in the order of their calls, wildcards included.
        receives = [comm.Irecv(room, *((BEFORE, 3) if i % 2 else ())) for i, room in enumerate(rooms)]
        WORLD.Barrier()
        sends = [comm.Isend(np.full(n, i + 1, "f4"), NEXT, 3) for i, n in enumerate(counts)]
        for request in reversed(receives):
            request.Wait()
        Request.Waitall(sends)
    for i, (room, n) in enumerate(zip(rooms, counts, strict=True)):
        assert (room[:n] == i + 1).all() and not room[n:].any()


@case
def by_polling() -> None:
    """Complete requests by Test alone, and by Waitany, beside a collective."""
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        total, room, status = np.ones(100_000, "f4"), np.zeros(100_000, "f4"), MPI.Status()
        summed = comm.Iallreduce(MPI.IN_PLACE, total)
        receive, send = comm.Irecv(room, tag=9), comm.Isend(values(100_000, "f4"), NEXT, 9)
        while not receive.Test(status):
            pass
        while not Request.Testall([send, summed, receive]):
            pass
        assert fields(status) == (BEFORE, 9, 400_000, False)
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
    """Send every second element and receive into every third; the elements between stay unchanged."""
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
def buffer_arguments() -> None:
    """Pass mpi4py's lists, bytes, and half floats, which mpi4py does not support."""
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
def proc_null() -> None:
    """Send to and receive from MPI.PROC_NULL."""
    with Communicator(WORLD, codec="split") as comm:
        room, ours, theirs = np.ones(50_000, "f4"), MPI.Status(), MPI.Status()
        comm.Send(room, MPI.PROC_NULL)
        for mine, status in ((comm, ours), (WORLD, theirs)):
            mine.Recv(room, MPI.PROC_NULL, 3, status)
            assert mine.Irecv(room, MPI.PROC_NULL).Wait() is not False
        assert fields(ours) == fields(theirs) and (room == 1).all()
        comm.Sendrecv(room, MPI.PROC_NULL, 0, room, MPI.PROC_NULL)
        # At the ends of a line of ranks.
        up, down = (RANK + 1 if RANK + 1 < SIZE else MPI.PROC_NULL), (RANK - 1 if RANK else MPI.PROC_NULL)
        comm.Sendrecv(np.full(50_000, RANK, "f4"), up, 0, room, down)
        assert (room == (RANK - 1 if RANK else 1)).all()


@case
def too_long() -> list[str]:
    found = []
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        for count in (10, 100_000):
            request, status = comm.Isend(np.ones(count, "f4"), NEXT, 4), MPI.Status()
            found.append(error_of(lambda count=count, to=status: comm.Recv(np.ones(count - 1, "f4"), BEFORE, 4, to)))
            request.Wait()
            assert fields(status) == (BEFORE, 4, 4 * count, False)
        compare(comm, 30_000, "f4")
    return found


@case
def wrong_type() -> list[str]:
    found = []
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        for count in (10, 100_000):
            request = comm.Isend(np.ones(count, "f4"), NEXT, 4)
            found.append(error_of(lambda count=count: comm.Recv(np.ones(count, "i4"), BEFORE)))
            request.Wait()
        pair = MPI.FLOAT.Create_vector(2, 1, 2).Commit()
        found.append(error_of(lambda: comm.Send([np.ones(4, "f4"), 1, pair], NEXT)))
        pair.Free()
        found.append(error_of(lambda: comm.Send(np.ones(4, "i4"), NEXT, codec="split")))
        compare(comm, 30_000, "f4")
    return found


class Failing(Raw):
    """Fails on rank 0 at the third chunk, when it is queued or (late) in its stream."""

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
    found = []
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        for side in ("encode", "decode"):
            for late in (0, 1):
                # With chunks of this size the stream has a thread.
                options = {"codec": f"failing:side={side},late={late}", "chunk": (1 << 16) + late}
                request = comm.Isend(np.ones(200_000, "f4"), NEXT, 6, **options)
                found.append(error_of(lambda: comm.Recv(np.ones(200_000, "f4"), BEFORE, codec="split")))
                found.append(error_of(request.Wait))
                compare(comm, 30_000, "f4")
    return found


@case
def memory() -> None:
    """Hold at most three frames of a long message, and nothing after it."""
    pool, chunk = get_device("host").pool, 1 << 18
    with Communicator(WORLD, codec="split", chunk=chunk) as comm:
        exchanged(comm, np.ones(1), np.ones(1), 0)
        pool.trim()
        before = pool.statistics
        exchanged(comm, values(4_000_000, "f4"), np.ones(4_000_000, "f4"), 0)
        after = pool.statistics
    assert after.in_use == before.in_use, (before, after)
    # Three frames in each direction, and the codec's workspace.
    assert after.retained <= 12 * chunk, after


COUNTS = (0, 1, 7, 300, 9_000, 100_000)
"""Messages within an envelope, in frames, and (sent by other calls) longer than any envelope."""


def probed(comm: Communicator, count: int, dtype: str) -> None:
    """Probe in every way, and receive what was found into a buffer of the size that the status tells."""
    expected = values(count, dtype, BEFORE)
    for method in ("Probe", "Iprobe", "Mprobe", "Improbe"):
        probe, status = getattr(comm, method), MPI.Status()
        found = probe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        while not found:
            found = probe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        assert fields(status) == (BEFORE, 11, expected.nbytes, False), (method, fields(status), count)
        room, got = np.ones(status.Get_count(MPI.BYTE) // expected.itemsize, dtype), MPI.Status()
        if method in ("Mprobe", "Improbe"):
            found.Recv(room, got)
        else:
            comm.Recv(room, status.source, status.tag, got)
        assert (room == expected).all() and fields(got) == fields(status)


@case
def probes() -> None:
    """Probe messages in frames, and those of mpi4py's other calls, before they are received."""
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        for send in (comm.Isend, comm.Issend if comm.rail_stats() is None else comm.Isend):
            for count in COUNTS:
                for dtype in ("f4", "i4"):
                    sent = values(count, dtype)
                    requests = [send(sent, NEXT, 11) for _ in range(4)]
                    probed(comm, count, dtype)
                    Request.Waitall(requests)
        assert not comm.Iprobe() and comm.Improbe(BEFORE, 3) is None
        status = MPI.Status()
        assert comm.Probe(MPI.PROC_NULL, 3, status) and status.source == MPI.PROC_NULL
        comm.Barrier()


@case
def probes_of_calls_with_a_codec() -> None:
    """Probe on a communicator without a codec: messages in frames, and passed through."""
    with Communicator(WORLD, chunk=CHUNK) as comm:
        for codec in ("split", None):
            for count in COUNTS:
                request, status = comm.Isend(values(count, "f4"), NEXT, 2, codec=codec), MPI.Status()
                comm.Probe(BEFORE, 2, status)
                assert fields(status) == (BEFORE, 2, 4 * count, False)
                room = np.ones(count, "f4")
                if codec:
                    comm.Recv(room, BEFORE, 2, codec=codec)
                else:
                    comm.Mprobe(BEFORE, 2).Recv(room)
                request.Wait()
                assert (room == values(count, "f4", BEFORE)).all()


@mixed_case
def mixed_calls() -> None:
    """Send one after the other by mpi4py's calls: messages arrive complete and in order."""
    MPI.Attach_buffer(bytearray(16 * sum(COUNTS) + 100 * MPI.BSEND_OVERHEAD))
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        for count in COUNTS:
            sent, rooms = [values(count, "f4") + n for n in range(7)], [np.ones(count, "f4") for _ in range(7)]
            receives = [comm.Irecv(room, BEFORE, 4) for room in rooms[:3]]
            receives.append(comm.Recv_init(rooms[3], BEFORE, 4))
            receives[3].Start()
            receives += [comm.Irecv(room, BEFORE, 4) for room in rooms[4:]]
            persistent = comm.Send_init(sent[3], NEXT, 4)
            requests = [comm.Isend(sent[0], NEXT, 4), comm.Issend(sent[1], NEXT, 4)]
            comm.Bsend(sent[2], NEXT, 4)
            persistent.Start()
            requests += [comm.Isend(sent[4], NEXT, 4), comm.Ibsend(sent[5], NEXT, 4)]
            requests.append(comm.Issend(sent[6], NEXT, 4))
            Request.Waitall([*receives, persistent, *requests])
            for n, room in enumerate(rooms):
                assert (room == values(count, "f4", BEFORE) + n).all(), (count, n)
            persistent.Free()
            replaced = values(count, "f4")
            comm.Sendrecv_replace(replaced, NEXT, 1, BEFORE, 1)
            assert (replaced == values(count, "f4", BEFORE)).all()
    MPI.Detach_buffer()


def improbed(comm: Communicator) -> MPI.Message:
    while (message := comm.improbe()) is None:
        pass
    return message


@mixed_case
def objects() -> None:
    """Send and receive objects, also by probes, beside messages in frames."""
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        for length in (1, 20_000, 100_000):
            sent, expected = [RANK] * length, [BEFORE] * length
            for receive in (
                lambda: comm.recv(None, BEFORE, 3),
                lambda: comm.mprobe().recv(),
                lambda: improbed(comm).recv(),
                lambda: comm.irecv(1 << 20, BEFORE).wait(),
            ):
                request, status = comm.isend(sent, NEXT, 3), MPI.Status()
                comm.probe(status=status)
                assert status.tag == 3 and status.count > length
                assert receive() == expected
                request.wait()
            assert comm.sendrecv(sent, NEXT, 0, None, BEFORE) == expected
        # As between mpi4py's own calls: pickled bytes may travel as a buffer, and the other way round.
        pickled = bytearray(MPI.pickle.dumps({"rank": RANK, "values": list(range(50_000))}))
        request = comm.Isend(pickled, NEXT)
        assert comm.recv(None, BEFORE) == {"rank": BEFORE, "values": list(range(50_000))}
        request.Wait()
        request, room = comm.isend(RANK, NEXT), bytearray(1000)
        comm.Recv(room, BEFORE)
        assert MPI.pickle.loads(room) == BEFORE
        request.wait()


@case
def cancelled() -> None:
    """Cancel receives: an unmatched one takes nothing, and a matched one completes."""
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        for count in COUNTS:
            room, status = np.ones(count, "f4"), MPI.Status()
            never = comm.Irecv(room, BEFORE, 6)
            never.Cancel()
            assert never.Wait(status) and status.Is_cancelled()
            comm.Barrier()
            request = comm.Isend(values(count, "f4"), NEXT, 6)
            comm.Probe(BEFORE, 6)
            late = comm.Irecv(room, BEFORE, 6)
            late.Cancel()
            late.Wait(status)
            assert fields(status) == (BEFORE, 6, 4 * count, False)
            request.Wait()
            assert (room == values(count, "f4", BEFORE)).all()


def one_of_each(comm: Communicator) -> tuple[list[np.ndarray], list[Request], Callable[[], list[Request]]]:
    """Start a sum, receives in frames, passed through and of mpi4py, and a persistent one; return how to send."""
    rooms = [np.zeros(count, "f4") for count in (50_000, 50_000, 10, 10, 50_000)]
    persistent = comm.Recv_init(rooms[4], BEFORE, 3)
    persistent.Start()
    receives = [
        comm.Iallreduce(MPI.IN_PLACE, rooms[0], name=f"sum {next(NUMBERS)}"),
        comm.Irecv(rooms[1], BEFORE, 1),
        comm.Irecv(rooms[2], BEFORE, 2, codec="none"),
        WORLD.Irecv(rooms[3], BEFORE, 2),
        persistent,
    ]

    def send() -> list[Request]:
        return [
            comm.Isend(values(50_000, "f4"), NEXT, 1),
            comm.Isend(values(10, "f4"), NEXT, 2, codec="none"),
            WORLD.Isend(values(10, "f4"), NEXT, 2),
            comm.Isend(values(50_000, "f4"), NEXT, 3),
        ]

    return rooms, receives, send


def all_arrived(rooms: list[np.ndarray]) -> bool:
    return all((room == values(room.size, "f4", BEFORE)).all() for room in rooms[1:])


def completed(requests: list[Request]) -> list[bool]:
    """Return True for each request that is complete, and check its truth value and comparisons."""
    for request in requests[:4]:
        assert bool(request) != (request == MPI.REQUEST_NULL) and (request == request) and (request != requests[4])
    return [request.Get_status() for request in requests]


@mixed_case
def completions() -> None:
    """Complete requests of every kind with each of mpi4py's functions, and fill in statuses."""
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        for function in (Request.Waitall, Request.Testall, Request.Waitsome, Request.Testsome, Request.Testany):
            rooms, receives, send = one_of_each(comm)
            assert not any(completed(receives)[1:])
            assert Request.Testany(receives[1:]) == (MPI.UNDEFINED, False)
            assert not Request.Testall(receives) and Request.Testsome(receives[1:]) == []
            comm.Barrier()  # no rank has sent yet
            sends, statuses = send(), []
            if function is Request.Waitall:
                assert Request.Waitall(receives, statuses)
            elif function is Request.Testall:
                while not Request.Testall(receives, statuses):
                    assert all(receives)  # all or none
            elif function is Request.Testany:
                indices, status = [], MPI.Status()
                while (found := Request.Testany(receives, status)) != (MPI.UNDEFINED, True):
                    if found[1]:
                        indices.append(found[0])
                        assert found[0] == 0 or fields(status)[:2] == (BEFORE, (1, 2, 2, 3)[found[0] - 1])
                assert sorted(indices) == [0, 1, 2, 3, 4]
            else:
                indices = []
                while (some := function(receives, statuses)) is not None:
                    for index, status in zip(some, statuses, strict=False):
                        assert index == 0 or fields(status)[2] == rooms[index].nbytes
                    indices += some
                assert sorted(indices) == [0, 1, 2, 3, 4]
            if function in (Request.Waitall, Request.Testall):
                sizes = [(status.tag, status.Get_count(MPI.FLOAT)) for status in statuses[1:]]
                assert sizes == [(1, 50_000), (2, 10), (2, 10), (3, 50_000)], sizes
            assert all_arrived(rooms) and all(completed(receives))
            assert [bool(request) for request in receives] == [False] * 4 + [True]
            assert Request.Testany(receives) == (MPI.UNDEFINED, True)
            assert Request.Waitsome(receives) is None and Request.testsome(receives) == (None, None)
            assert Request.Waitall(sends)


@mixed_case
def cancelled_requests() -> list[str]:
    """Cancel what was started in frames, passed through and persistently, and a collective."""
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        receives = [comm.Irecv(np.ones(3), BEFORE), comm.Irecv(np.ones(3), BEFORE, codec="none")]
        receives.append(comm.Recv_init(np.ones(3), BEFORE))
        receives[2].Start()
        for request in receives:
            status = MPI.Status()
            assert not request.get_status()
            request.cancel()
            request.Wait(status)
            assert status.Is_cancelled()
        summed = comm.Iallreduce(MPI.IN_PLACE, np.ones(50_000))
        found = [error_of(summed.Cancel)]
        summed.Wait()
    return found


@mixed_case
def too_long_without_frames() -> list[str]:
    """Receive a message of another call into a buffer that is too short."""
    found = []
    with Communicator(WORLD, codec="split", chunk=CHUNK) as comm:
        for count in (10, 100_000):
            request = comm.Issend(np.ones(count, "f4"), NEXT, 4)
            found.append(error_of(lambda count=count: comm.Recv(np.ones(count - 1, "f4"), BEFORE, 4)))
            request.Wait()
        compare(comm, 30_000, "f4")
    return found


@case
def freed() -> None:
    """Check that Free leaves no communicator and no thread."""
    before = threading.active_count()
    comm = Communicator(WORLD, codec="split")
    compare(comm, 100_000, "f4")
    assert threading.active_count() > before
    comm.Free()
    assert not comm._p2p._channel.envelopes._comm
    assert threading.active_count() == before


def main(names: list[str]) -> None:
    found = {name: CALLS[name]() for name in names or CALLS}
    by_rank = WORLD.gather(found)
    if RANK == 0:
        assert all(list(one) == list(other) for one, other in pairwise(by_rank))
        print(json.dumps(by_rank))


if __name__ == "__main__":
    main(sys.argv[1:])
