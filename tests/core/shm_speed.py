"""Compare the shared-memory wire with the MPI library's, by turns in one run: `mpirun -n 2 python shm_speed.py`."""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

SOURCES = Path(__file__).resolve().parents[2] / "mpi_gpucomp" / "core" / "src"
ROUNDS = 15
SPIN = 50_000
MiB = 1 << 20


def build(directory: str) -> ctypes.CDLL:
    """Compile the wire and the program that moves messages."""
    library = f"{directory}/libshm_speed.so"
    sources = [Path(__file__).with_suffix(".cpp"), SOURCES / "shm_wire.cpp", SOURCES / "shm_peers.cpp"]
    flags = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", f"-I{SOURCES}"]
    subprocess.run(["c++", *flags, *map(str, sources), "-o", library], check=True)
    return ctypes.CDLL(library)


class SharedMemory:
    """The wire with one of its two paths."""

    def __init__(self, library: ctypes.CDLL, comm: MPI.Intracomm, single_copy: bool) -> None:
        library.gc_shm_create.restype = ctypes.c_void_p
        library.shm_speed_fault.restype = ctypes.c_char_p
        self._library, self._rank = library, comm.rank
        key = comm.bcast(f"/dev/shm/{uuid.uuid4().hex}").encode()
        self._wire = ctypes.c_void_p(
            library.gc_shm_create(key, comm.rank, comm.size, ctypes.c_int64(0), ctypes.c_int(single_copy))
        )
        comm.Barrier()
        self._check(library.gc_shm_attach(self._wire, ctypes.c_int64(10**10)))

    def move(self, data: np.ndarray[Any, Any], part: int) -> None:
        """Send from rank 0 to rank 1, in messages of `part` bytes."""
        numbers = map(ctypes.c_int64, (data.nbytes, part, SPIN))
        pointer = data.ctypes.data_as(ctypes.c_void_p)
        self._check(self._library.shm_speed_move(self._wire, ctypes.c_int(self._rank == 0), pointer, *numbers))

    def exchange(self, data: np.ndarray[Any, Any], rounds: int) -> None:
        """Send there and back, `rounds` times."""
        pointer = data.ctypes.data_as(ctypes.c_void_p)
        nbytes, spin = ctypes.c_int64(data.nbytes), ctypes.c_int64(SPIN)
        self._check(self._library.shm_speed_exchange(self._wire, pointer, nbytes, ctypes.c_int(rounds), spin))

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(self._library.shm_speed_fault(self._wire).decode())


def stream(comm: MPI.Intracomm, data: np.ndarray[Any, Any], part: int) -> None:
    """Send from rank 0 to rank 1 with MPI, in messages of `part` bytes."""
    post = comm.Isend if comm.rank == 0 else comm.Irecv
    MPI.Request.Waitall([post(data[k : k + part], 1 - comm.rank) for k in range(0, data.nbytes, part)])


def exchange(comm: MPI.Intracomm, data: np.ndarray[Any, Any], rounds: int) -> None:
    """Send there and back with MPI, `rounds` times."""
    for k in range(2 * rounds):
        (comm.Send if k % 2 == comm.rank else comm.Recv)(data, 1 - comm.rank)


def main() -> None:
    """Print milliseconds: the median and the best of all rounds, and the ratio of the medians."""
    comm = MPI.COMM_WORLD
    with tempfile.TemporaryDirectory() as directory:
        shared = comm.bcast(directory)
        if comm.rank == 0:
            build(shared)
        comm.Barrier()
        library = ctypes.CDLL(f"{shared}/libshm_speed.so")
        wires = {name: SharedMemory(library, comm, name == "single copy") for name in ("single copy", "two copies")}
        comm.Barrier()
    message = np.full(64 * MiB, comm.rank, np.uint8)
    short, medium = message[:8], message[: 64 << 10]
    cases: dict[str, tuple[Callable[[], object], Callable[[SharedMemory], object]]] = {
        "64 MB, broadcast": (lambda: comm.Bcast(message), lambda wire: wire.move(message, message.nbytes)),
        "64 MB, one message": (
            lambda: stream(comm, message, message.nbytes),
            lambda w: w.move(message, message.nbytes),
        ),
        "64 MB, messages of 1 MiB": (lambda: stream(comm, message, MiB), lambda wire: wire.move(message, MiB)),
        "64 MB, messages of 128 KiB": (
            lambda: stream(comm, message, MiB // 8),
            lambda wire: wire.move(message, MiB // 8),
        ),
        "64 KiB, 100 exchanges": (lambda: exchange(comm, medium, 100), lambda wire: wire.exchange(medium, 100)),
        "8 bytes, 100 exchanges": (lambda: exchange(comm, short, 100), lambda wire: wire.exchange(short, 100)),
    }
    for case, (native, ours) in cases.items():
        calls: dict[str, Callable[[], object]] = {
            "MPI": native,
            **{name: partial(ours, wire) for name, wire in wires.items()},
        }
        took: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                message.fill(comm.rank)
                comm.Barrier()
                begin = time.perf_counter()
                call()
                took[name].append(comm.allreduce(time.perf_counter() - begin, MPI.MAX) * 1e3)
                if "64 MB" in case and message.any():
                    raise RuntimeError(f"{name}: other bytes")
        if comm.rank == 0:
            best = {name: min(values) for name, values in took.items()}
            middle = {name: statistics.median(values) for name, values in took.items()}
            for name in calls:
                ratio = middle[name] / middle["MPI"], best[name] / best["MPI"]
                print(
                    f"{case:27} {name:12} {middle[name]:8.2f} {best[name]:8.2f}   / MPI {ratio[0]:5.2f} {ratio[1]:5.2f}"
                )


if __name__ == "__main__":
    main()
