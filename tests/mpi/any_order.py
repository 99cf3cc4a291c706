"""Run under mpirun: every rank starts collectives, and waits for them, in a different order.

any_order.py SEED            200 collectives in 2 slots
any_order.py SEED SECONDS    rounds for this time, each with random slots, chunks, sizes and priorities
"""

from __future__ import annotations

import faulthandler
import sys
from random import Random
from time import monotonic

from mpi4py import MPI

from mpi_gpucomp import Communicator
from osu_bench.experiments.any_order import Call, draw, shuffled

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
HANG_SECONDS = 110
"""After this time a rank that hangs prints its stack and exits."""


def complete(comm: Communicator, calls: list[Call], seed: int, most_priority: int = 0) -> None:
    """Start all calls in one random order and wait for them in another; the orders differ among ranks."""
    random, requests = Random(seed * SIZE + RANK), {}
    for call in shuffled(calls, seed, RANK):
        options = {"name": call.what.name, "codec": call.what.codec, "priority": random.randint(0, most_priority)}
        requests[call] = call.start(comm, **options)
    for call in shuffled(calls, seed + 1, RANK):
        requests[call].Wait()


def verify(calls: list[Call]) -> None:
    """Compare with the expected values, then with native MPI on the same buffers, in order."""
    for call in calls:
        assert not call.wrong(), f"rank {RANK}: {call.what} is wrong"
        ours = None if call.receive is None else call.receive.tobytes()
        call.reset()
        call.start(WORLD).Wait()
        assert ours is None or ours == call.receive.tobytes(), f"rank {RANK}: {call.what} differs from native MPI"


def run(seed: int, collectives: int, *, most_bytes: int, slots: int, chunk: int, most_priority: int = 0) -> None:
    calls = [Call(collective, RANK) for collective in draw(seed, collectives, SIZE, most_bytes)]
    for call in calls:
        call.reset()
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    with Communicator(WORLD, slots=slots, chunk=chunk) as comm:
        complete(comm, calls, seed, most_priority)
    faulthandler.cancel_dump_traceback_later()
    verify(calls)


def stress(seed: int, seconds: float) -> int:
    """Run rounds until rank 0's time is over; return the number of verified collectives."""
    end, right = monotonic() + seconds, 0
    while WORLD.bcast(monotonic() < end):
        random = Random(seed)
        collectives, most_priority = random.randint(1, 100), random.choice([0, 3])
        sizes = {
            "most_bytes": 1 << random.randint(3, 20),
            "slots": random.randint(1, 4),
            "chunk": 1 << random.randint(12, 20),
        }
        if RANK == 0:
            print(f"run({seed}, {collectives}, **{sizes}, most_priority={most_priority})", file=sys.stderr, flush=True)
        run(seed, collectives, **sizes, most_priority=most_priority)
        right, seed = right + collectives, seed + 1
    return right


def main() -> None:
    seed, *seconds = map(int, sys.argv[1:])
    if seconds:
        right = stress(seed, seconds[0])
    else:
        right = 200
        run(seed, right, most_bytes=1 << 20, slots=2, chunk=1 << 18)
    print(f"rank {RANK} of {SIZE}: {right} collectives right")


if __name__ == "__main__":
    main()
