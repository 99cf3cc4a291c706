"""Run under mpirun: collectives that each rank starts, and waits for, in an order of its own.

any_order.py SEED            200 collectives in 2 slots
any_order.py SEED SECONDS    for so long, with slots, chunks, sizes and priorities drawn anew for every round
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
PATIENCE = 110
"""Seconds after which a round counts as hung."""


def complete(comm: Communicator, calls: list[Call], seed: int, most_priority: int = 0) -> None:
    """Start all in one order and wait for them in another, neither of them another rank's."""
    random, requests = Random(seed * SIZE + RANK), {}
    for call in shuffled(calls, seed, RANK):
        options = {"name": call.what.name, "codec": call.what.codec, "priority": random.randint(0, most_priority)}
        requests[call] = call.start(comm, **options)
    for call in shuffled(calls, seed + 1, RANK):
        requests[call].Wait()


def verify(calls: list[Call]) -> None:
    """Compare with the definition, then with what MPI makes of the same buffers, in order."""
    for call in calls:
        assert not call.wrong(), f"rank {RANK}: {call.what} is wrong"
        ours = None if call.receive is None else call.receive.tobytes()
        call.reset()
        call.start(WORLD).Wait()
        assert ours is None or ours == call.receive.tobytes(), f"rank {RANK}: {call.what} is not as MPI has it"


def run(seed: int, collectives: int, *, most_bytes: int, slots: int, chunk: int, most_priority: int = 0) -> None:
    calls = [Call(collective, RANK) for collective in draw(seed, collectives, SIZE, most_bytes)]
    for call in calls:
        call.reset()
    faulthandler.dump_traceback_later(PATIENCE, exit=True)  # a rank that hangs shows where, and ends
    with Communicator(WORLD, slots=slots, chunk=chunk) as comm:
        complete(comm, calls, seed, most_priority)
    faulthandler.cancel_dump_traceback_later()
    verify(calls)


def stress(seed: int, seconds: float) -> int:
    """Run rounds until the time is over on rank 0, which says what it runs; return how many collectives were right."""
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
