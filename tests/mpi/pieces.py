"""Run under mpirun on three ranks: messages in pieces between transports, in every manner that an engine asks for them.

Rank 0 sends to rank 1, which sends on to rank 2.
"""

from __future__ import annotations

import math

import numpy as np
from mpi4py import MPI

from mpi_gpucomp.transport import segmented as cut
from mpi_gpucomp.transport.base import Transfer
from mpi_gpucomp.transport.mpi import MpiTransport

WORLD = MPI.COMM_WORLD
RANK = WORLD.rank
cut.MOST = 64
CUT = cut.Segmentation(1000)
LENGTHS = (0, 1, 935, 936, 937, 999, 1000, 1001, 1937, 1938, 1939, 5000, 64 * 1001 + 936, 64 * 1001 + 937, 90_000)
"""Around the lengths at which there is one piece more, and beyond those that have enough pieces."""
ROOM = 100_000
KEPT: list[np.ndarray] = []
"""What is sent, until the end."""


def wait(transfer: Transfer) -> None:
    while not transfer.done():
        pass


def values(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes).astype(np.uint8)


def send(transport: MpiTransport, peer: int, tag: int, data: np.ndarray) -> Transfer:
    KEPT.append(data)
    return transport.send(peer, tag, data.ctypes.data, data.nbytes)


def receive(transport: MpiTransport, peer: int, tag: int) -> tuple[Transfer, np.ndarray]:
    room = np.zeros(ROOM, np.uint8)
    return transport.receive(peer, tag, room.ctypes.data, ROOM), room


def check(transfer: Transfer, room: np.ndarray, seed: int, nbytes: int) -> None:
    assert transfer.nbytes == nbytes, (transfer.nbytes, nbytes)
    assert (room[:nbytes] == values(seed, nbytes)).all(), (seed, nbytes)
    assert not room[nbytes:].any(), "nothing else was written"


def in_any_order(transport: MpiTransport, order: int) -> None:
    """Ask for the last message first, or the first; some are short, some whole, some cut."""
    if RANK == 0:
        data = [values(seed, nbytes) for seed, nbytes in enumerate(LENGTHS)]
        for transfer in [send(transport, 1, 5, one) for one in data][::order]:
            wait(transfer)
    elif RANK == 1:
        asked = [receive(transport, 0, 5) for _ in LENGTHS]
        for transfer, _ in asked[::order]:
            wait(transfer)
        for seed, ((transfer, room), nbytes) in enumerate(zip(asked, LENGTHS, strict=True)):
            check(transfer, room, seed, nbytes)


def sent_on(transport: MpiTransport) -> None:
    """Send on what arrives while it does; what came in one piece is sent when it is there."""
    for seed, nbytes in enumerate(LENGTHS):
        if RANK == 0:
            data = values(seed, nbytes)
            wait(send(transport, 1, 6, data))
        elif RANK == 1:
            transfer, room = receive(transport, 0, 6)
            while not transfer.begun():
                pass
            further = transport.relay(transfer, 2, 6)
            # The last piece may follow the others by itself, and all that is left go with it.
            assert (further is None) == (nbytes <= 936), nbytes
            wait(transfer)
            check(transfer, room, seed, nbytes)
            wait(further or transport.send(2, 6, room.ctypes.data, nbytes))
        else:
            transfer, room = receive(transport, 1, 6)
            wait(transfer)
            check(transfer, room, seed, nbytes)


def taken_back(transport: MpiTransport) -> None:
    """Take back what nothing has come for; what was asked for before it still comes first."""
    if RANK == 1:
        kept, room = receive(transport, 0, 7)
        others = [receive(transport, 0, 7) for _ in range(3)]
        assert all(transfer.cancel() for transfer, _ in others[::-1])
    WORLD.Barrier()
    if RANK == 0:
        for transfer in [send(transport, 1, 7, values(seed, 5000)) for seed in (1, 2)]:
            wait(transfer)
    elif RANK == 1:
        later, other = receive(transport, 0, 7)
        wait(later)
        wait(kept)
        check(kept, room, 1, 5000)
        check(later, other, 2, 5000)
        assert not kept.cancel()


def thrown_away(transport: MpiTransport) -> None:
    """Throw away what nobody wants, between two that somebody does."""
    if RANK == 0:
        for transfer in [send(transport, 1, 8, values(seed, 5000 + seed)) for seed in range(3)]:
            wait(transfer)
    elif RANK == 1:
        first, room = receive(transport, 0, 8)
        wait(first)
        check(first, room, 0, 5000)
        while (unwanted := transport.discard(0, 8)) is None:
            pass
        third, room = receive(transport, 0, 8)
        wait(third)
        check(third, room, 2, 5002)
        wait(unwanted)


def whole_where_fast(transport: MpiTransport) -> None:
    """Cut until the wire is known, then not where it is fast."""
    if RANK == 0:
        for seed in range(2 * cut.WINDOW):
            transfer = send(transport, 1, 9, values(seed, 90_000))
            assert (type(transfer).__name__ == "SentPieces") == (cut.SLOW > 0 or seed < cut.WINDOW), seed
            wait(transfer)
    elif RANK == 1:
        for seed in range(2 * cut.WINDOW):
            transfer, room = receive(transport, 0, 9)
            wait(transfer)
            check(transfer, room, seed, 90_000)


for slow in (math.inf, 0.0):
    cut.SLOW = slow
    made = MpiTransport(WORLD, CUT, frozenset(range(3)) - {RANK})
    whole_where_fast(made)
    for order in (1, -1):
        in_any_order(made, order)
    if slow:
        sent_on(made)
    taken_back(made)
    thrown_away(made)
    assert not made.latest, "nothing is kept of what is done"
    totals = WORLD.allgather((made.bytes_sent, made.bytes_received))
    assert sum(sent for sent, _ in totals) == sum(received for _, received in totals), totals
    made.close()
print(f"rank {RANK}: all right")
