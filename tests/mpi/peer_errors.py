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

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp.codec import Codec, Pending, register
from mpi_gpucomp.device import DTYPES

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


class Corrupter:
    """Corrupts a message that this rank sends for one collective."""

    def __init__(self, comm: Communicator) -> None:
        self._engine, transport = comm._runtime.engine, comm._runtime.transport
        self._send, transport.send = transport.send, self.send
        self._kept: list[object] = []
        self.aim("", 0, "")

    def aim(self, name: str, number: int, how: str) -> None:
        """Corrupt message `number`, counted from 0, of the collective with this name."""
        self._name, self._left, self._how = name, number, how
        self._last: dict[tuple[int, int], bytes] = {}
        self.peer: int | None = None

    def send(self, peer: int, tag: int, address: int, nbytes: int) -> object:
        if self._name and self.peer is None and self._is_target(peer, tag):
            before, data = self._last.get((peer, tag)), ctypes.string_at(address, nbytes)
            self._last[peer, tag] = data
            if self._left <= 0 and (self._how != "repeat" or before):
                self.peer = peer
                self._kept.append(ctypes.create_string_buffer(self._corrupted(bytearray(data), before)))
                address, nbytes = ctypes.addressof(self._kept[-1]), len(self._kept[-1]) - 1
            self._left -= 1
        return self._send(peer, tag, address, nbytes)

    def _is_target(self, peer: int, tag: int) -> bool:
        jobs = [job for job in self._engine._jobs.values() if job.name == self._name]
        return any(tag - tag % 8 == job.task.peer_tags.get(peer) for job in jobs)

    def _corrupted(self, data: bytearray, before: bytes | None) -> bytes:
        if self._how == "repeat":
            return before or b""
        if self._how == "truncate":
            return bytes(data[: random.randrange(len(data))])
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        return bytes(data)


def wire(comm: Communicator, rounds: int) -> list[dict[str, object]]:
    """Corrupt one message in each round, with other collectives in flight."""
    corrupter, rounds_found, kinds = Corrupter(comm), [], ["chain", "tree", "ring", "pairwise"]
    variants = [(kind, how) for kind in kinds for how in ("flip", "truncate", "repeat")]
    variants = [(kind, how) for kind, how in variants if how != "repeat" or kind in ("chain", "tree")]
    for number in range(rounds):
        choice = random.Random(number)
        kind, how = variants[number % len(variants)]
        culprit = choice.randrange(SIZE)
        corrupter.aim("target" if culprit == RANK else "", choice.randrange(4), how)
        names = [f"other {n}" for n in range(4)] + ["target"]
        random.Random(number * SIZE + RANK).shuffle(names)
        started = {
            name: Started(comm, kind if name == "target" else kinds[int(name[-1])], name=name, codec="split")
            for name in names
        }
        results = {name: one.result() for name, one in started.items()}
        finder = corrupter.peer
        corrupter.aim("", 0, "")
        again = Started(comm, kind, name="target", codec="split")
        rounds_found.append(
            {
                "kind": kind,
                "how": how,
                "culprit": culprit,
                "finder": finder,
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
    random.seed(RANK)
    with Communicator(WORLD, codec="split", chunk=40_000, timeout=20.0) as comm:
        found = wire(comm, int(sys.argv[2])) if sys.argv[1] == "wire" else code(comm)
    by_rank = WORLD.gather(found)
    if RANK == 0:
        print(json.dumps(by_rank))


if __name__ == "__main__":
    main()
