"""Run under mpirun on three ranks: segmented messages, used in every way an engine does.

Rank 0 sends to rank 1, which relays to rank 2.
"""

from __future__ import annotations

import math
from ctypes import byref, c_int64

import numpy as np
from mpi4py import MPI

from mpi_gpucomp.core.library import core
from mpi_gpucomp.core.wire import Transfer
from mpi_gpucomp.transport import mpi
from mpi_gpucomp.transport.mpi import MpiWire

WORLD = MPI.COMM_WORLD
RANK = WORLD.rank
SEGMENT_BYTES, WINDOW = 1000, 8
mpi.MAX_SEGMENTS = 64
LENGTHS = (0, 1, 935, 936, 937, 999, 1000, 1001, 1937, 1938, 1939, 5000, 64 * 1001 + 936, 64 * 1001 + 937, 90_000)
"""Around the lengths that add a segment, and beyond the largest number of segments."""
CAPACITY = 100_000
RETAINED: list[np.ndarray] = []
"""Keeps the sent arrays alive."""


def wait(transfer: Transfer) -> None:
    while not transfer.done():
        pass


def values(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes).astype(np.uint8)


def send(wire: MpiWire, peer: int, tag: int, data: np.ndarray) -> Transfer:
    RETAINED.append(data)
    return wire.send(peer, tag, data.ctypes.data, data.nbytes)


def receive(wire: MpiWire, peer: int, tag: int) -> tuple[Transfer, np.ndarray]:
    buffer = np.zeros(CAPACITY, np.uint8)
    return wire.receive(peer, tag, buffer.ctypes.data, CAPACITY), buffer


def begun(wire: MpiWire, transfer: Transfer) -> bool:
    return bool(core().gc_begun(wire.handle, transfer._handle))


def relay(wire: MpiWire, transfer: Transfer, peer: int, tag: int) -> Transfer | None:
    handle = core().gc_relay(wire.handle, transfer._handle, peer, tag)
    return Transfer(wire, handle, peer, tag) if handle else None


def discard(wire: MpiWire, peer: int, tag: int) -> Transfer | None:
    handle = core().gc_discard(wire.handle, peer, tag)
    return Transfer(wire, handle, peer, tag) if handle else None


def segmented_messages(wire: MpiWire) -> int:
    counts = c_int64(), c_int64()
    core().gc_mpi_counts(wire._wire, byref(counts[0]), byref(counts[1]))
    return counts[0].value


def check(transfer: Transfer, buffer: np.ndarray, seed: int, nbytes: int) -> None:
    assert transfer.nbytes == nbytes, (transfer.nbytes, nbytes)
    assert (buffer[:nbytes] == values(seed, nbytes)).all(), (seed, nbytes)
    assert not buffer[nbytes:].any(), "nothing beyond the message was written"


def in_any_order(wire: MpiWire, order: int) -> None:
    """Wait for the last message first, or the first; some are short, some whole, some segmented."""
    if RANK == 0:
        data = [values(seed, nbytes) for seed, nbytes in enumerate(LENGTHS)]
        for transfer in [send(wire, 1, 5, one) for one in data][::order]:
            wait(transfer)
    elif RANK == 1:
        posted = [receive(wire, 0, 5) for _ in LENGTHS]
        for transfer, _ in posted[::order]:
            wait(transfer)
        for seed, ((transfer, buffer), nbytes) in enumerate(zip(posted, LENGTHS, strict=True)):
            check(transfer, buffer, seed, nbytes)


def relayed(wire: MpiWire) -> None:
    """Relay messages while they arrive; an unsegmented one is sent once it has arrived."""
    for seed, nbytes in enumerate(LENGTHS):
        if RANK == 0:
            data = values(seed, nbytes)
            wait(send(wire, 1, 6, data))
        elif RANK == 1:
            transfer, buffer = receive(wire, 0, 6)
            while not begun(wire, transfer):
                pass
            further = relay(wire, transfer, 2, 6)
            # The last segment takes all that is left.
            assert (further is None) == (nbytes <= 936), nbytes
            wait(transfer)
            check(transfer, buffer, seed, nbytes)
            wait(further or wire.send(2, 6, buffer.ctypes.data, nbytes))
        else:
            transfer, buffer = receive(wire, 1, 6)
            wait(transfer)
            check(transfer, buffer, seed, nbytes)


def cancelled(wire: MpiWire) -> None:
    """Cancel unmatched receives; those posted before still match first."""
    if RANK == 1:
        kept, buffer = receive(wire, 0, 7)
        others = [receive(wire, 0, 7) for _ in range(3)]
        assert all(transfer.cancel() for transfer, _ in others[::-1])
    WORLD.Barrier()
    if RANK == 0:
        for transfer in [send(wire, 1, 7, values(seed, 5000)) for seed in (1, 2)]:
            wait(transfer)
    elif RANK == 1:
        later, other = receive(wire, 0, 7)
        wait(later)
        wait(kept)
        check(kept, buffer, 1, 5000)
        check(later, other, 2, 5000)
        assert not kept.cancel()


def discarded(wire: MpiWire) -> None:
    """Discard an unexpected message between two that are received."""
    if RANK == 0:
        for transfer in [send(wire, 1, 8, values(seed, 5000 + seed)) for seed in range(3)]:
            wait(transfer)
    elif RANK == 1:
        first, buffer = receive(wire, 0, 8)
        wait(first)
        check(first, buffer, 0, 5000)
        while (dropped := discard(wire, 0, 8)) is None:
            pass
        third, buffer = receive(wire, 0, 8)
        wait(third)
        check(third, buffer, 2, 5002)
        wait(dropped)


def whole_where_fast(wire: MpiWire) -> None:
    """Segment messages until the link's rate is known, then only if it is slow."""
    if RANK == 0:
        for seed in range(2 * WINDOW):
            before = segmented_messages(wire)
            transfer = send(wire, 1, 9, values(seed, 90_000))
            assert (segmented_messages(wire) > before) == (mpi.SLOW > 0 or seed < WINDOW), seed
            wait(transfer)
    elif RANK == 1:
        for seed in range(2 * WINDOW):
            transfer, buffer = receive(wire, 0, 9)
            wait(transfer)
            check(transfer, buffer, seed, 90_000)


for slow in (math.inf, 0.0):
    mpi.SLOW = slow
    made = MpiWire(WORLD, SEGMENT_BYTES, frozenset(range(3)) - {RANK})
    whole_where_fast(made)
    for order in (1, -1):
        in_any_order(made, order)
    if slow:
        relayed(made)
    cancelled(made)
    discarded(made)
    totals = WORLD.allgather((made.bytes_sent, made.bytes_received))
    assert sum(sent for sent, _ in totals) == sum(received for _, received in totals), totals
    made.close()
print(f"rank {RANK}: all right")
