"""Run under mpirun: corrupted messages, and codecs and callbacks that raise on one rank; every rank reports its error.

peer_errors.py wire ROUNDS    messages that are corrupted, truncated or repeated, among other collectives
peer_errors.py code           codecs that raise, in the call or in their queued work, and callbacks
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import random
import sys
import zlib
from functools import partial

import faulty
import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp.codec import Codec, Pending, register
from mpi_gpucomp.core.library import core
from mpi_gpucomp.device import DTYPES
from mpi_gpucomp.engine.task import CollectiveTask

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
COUNT = 60_000
CULPRIT = 1
"""The rank on which codecs and callbacks raise."""


class Fragile(Codec):
    """Python's zlib, which raises on one rank on request."""

    name, lossless, wire_id = "fragile", True, 0xF0020000
    dtypes = tuple(dtype.name for dtype in DTYPES)
    raises = ""
    """One of encode, decode, queued encode, queued decode."""

    @property
    def spec(self) -> str:
        return "fragile"

    def max_encoded(self, count: int, dtype: object) -> int:
        return count * dtype.itemsize * 11 // 10 + 100

    def encode(self, source: object, to: object, stream: object) -> Pending:
        def work() -> int:
            data = zlib.compress(ctypes.string_at(source.address, source.nbytes), 1)
            ctypes.memmove(to.address, data, len(data))
            return len(data)

        return self._queue("encode", work, stream)

    def decode(self, source: object, nbytes: int, to: object, stream: object) -> Pending:
        return self.decode_reduce(source, nbytes, to, "replace", stream)

    def decode_reduce(self, source: object, nbytes: int, to: object, op: str, stream: object) -> Pending:
        def work() -> int:
            decoded = np.frombuffer(zlib.decompress(ctypes.string_at(source.address, nbytes)), np.float32)
            here = np.frombuffer((ctypes.c_uint8 * to.nbytes).from_address(to.address), np.float32)
            here[:] = decoded if op == "replace" else here + decoded
            return nbytes

        return self._queue("decode", work, stream)

    def _queue(self, what: str, work: object, stream: object) -> Pending:
        def run() -> None:
            if RANK == CULPRIT and Fragile.raises == f"queued {what}":
                raise ZeroDivisionError(f"cannot {what}")
            sizes.append(work())

        if RANK == CULPRIT and Fragile.raises == what:
            raise ZeroDivisionError(f"cannot {what}")
        sizes: list[int] = []
        stream.run(run)
        event = stream.record()
        return Pending(event.done, lambda: (event.wait(), sizes[0])[1])


def error_of(work: object) -> str:
    try:
        work()
        return "no error"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Started:
    """A collective in flight, with its expected output."""

    def __init__(self, comm: Communicator, kind: str, root: int = 0, **options: object) -> None:
        one, many = np.full(COUNT, RANK, np.float32), np.arange(SIZE * COUNT, dtype=np.float32) + RANK
        match kind:
            case "chain" | "tree":
                self.got, self.right = one, np.full(COUNT, root, np.float32)
                self.request = comm.Ibcast(one, root, algorithm=kind, **options)
            case "ring":
                self.got, self.right = one, np.full(COUNT, sum(range(SIZE)), np.float32)
                self.request = comm.Iallreduce(MPI.IN_PLACE, one, algorithm=kind, **options)
            case "pairwise":
                self.got = np.zeros(SIZE * COUNT, np.float32)
                mine = np.arange(RANK * COUNT, (RANK + 1) * COUNT, dtype=np.float32)
                self.right = np.concatenate([mine + rank for rank in range(SIZE)])
                self.request = comm.Ialltoall(many, self.got, algorithm=kind, **options)

    def result(self) -> str:
        error = error_of(self.request.Wait)
        return error if error != "no error" or np.array_equal(self.got, self.right) else "wrong result"


HOW = {"flip": faulty.FLIP, "truncate": faulty.CUT, "repeat": faulty.REPEAT}


def wire(comm: Communicator, rounds: int) -> list[dict[str, object]]:
    """Corrupt one message in each round, with other collectives in flight."""
    aiming, rounds_found, kinds = False, [], ["chain", "tree", "ring", "pairwise"]
    faulty_wire, set_peer_tag = faulty.wire_of(comm), CollectiveTask.set_peer_tag

    def aim(task: CollectiveTask, peer: int, tag: int) -> None:
        """Damage messages of the target, before the first can be sent."""
        if aiming and task.title.endswith("'target'"):
            core().gc_faulty_add_target(faulty_wire, peer, tag)
        set_peer_tag(task, peer, tag)

    CollectiveTask.set_peer_tag = aim
    variants = [(kind, how) for kind in kinds for how in ("flip", "truncate", "repeat")]
    variants = [(kind, how) for kind, how in variants if how != "repeat" or kind in ("chain", "tree")]
    for number in range(rounds):
        choice = random.Random(number)
        kind, how = variants[number % len(variants)]
        culprit = choice.randrange(SIZE)
        at = choice.randrange(4)
        names = [f"other {n}" for n in range(4)] + ["target"]
        random.Random(number * SIZE + RANK).shuffle(names)
        core().gc_faulty_damage(faulty_wire, at, HOW[how], number)
        aiming = culprit == RANK
        started = {
            name: Started(comm, kind if name == "target" else kinds[int(name[-1])], name=name, codec="split")
            for name in names
        }
        results = {name: one.result() for name, one in started.items()}
        finder, aiming = core().gc_faulty_damaged_peer(faulty_wire), False
        again = Started(comm, kind, name="target", codec="split")
        rounds_found.append(
            {
                "kind": kind,
                "how": how,
                "culprit": culprit,
                "finder": None if finder < 0 else finder,
                "target": results.pop("target"),
                "others": sorted(set(results.values())),
                "again": again.result(),
            }
        )
    return rounds_found


def code(comm: Communicator) -> dict[str, str]:
    """Let codecs and callbacks raise, each once, with a collective of another codec in flight."""
    register("fragile", lambda parameters: Fragile(), "zlib that may raise", example="fragile")
    found = {}
    for raises in ("encode", "decode", "queued encode", "queued decode"):
        for kind in ("chain", "ring"):
            Fragile.raises, root = raises, CULPRIT if "encode" in raises else 0
            other = Started(comm, "pairwise", codec="split", name="other")
            one = Started(comm, kind, root, codec="fragile", name="one")
            found[f"{raises} {kind}"] = one.result()
            found[f"{raises} {kind}, other"] = other.result()
            WORLD.Barrier()
            Fragile.raises = ""
            found[f"{raises} {kind}, again"] = Started(comm, kind, codec="fragile", name="one").result()

    def callback() -> None:
        if RANK == CULPRIT:
            raise ZeroDivisionError("cannot call back")

    found["callback"] = Started(comm, "ring", codec="split", name="one", callback=callback).result()
    found["callback, next"] = error_of(partial(comm.Allreduce, MPI.IN_PLACE, np.ones(COUNT), codec="split"))
    found["callback, again"] = Started(comm, "ring", codec="split", name="one").result()
    return found


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    faulty.install()
    with Communicator(WORLD, codec="split", chunk=40_000, timeout=20.0) as comm:
        found = wire(comm, int(sys.argv[2])) if sys.argv[1] == "wire" else code(comm)
    by_rank = WORLD.gather(found)
    if RANK == 0:
        print(json.dumps(by_rank))


if __name__ == "__main__":
    main()
