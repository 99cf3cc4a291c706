"""Point-to-point messages under mpirun."""

from __future__ import annotations

import json

import pytest
from launch import needs_mpirun, run

pytestmark = needs_mpirun

LONGER = "Pass a receive buffer of the message's type that is at least as long."
ENCODED = "'python -m mpi_gpucomp codecs' lists them."


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_messages_match_native_mpi(ranks):
    done = run(ranks, "-m", "mpi4py", "tests/mpi/point_to_point.py")  # aborts all ranks when one fails
    assert done.returncode == 0, done.stderr
    by_rank = json.loads(done.stdout)
    assert len(by_rank) == ranks
    for rank, found in enumerate(by_rank):
        receiver = f"rank {rank}: Recv from rank {(rank - 1) % ranks}"
        assert found.pop("too_long") == [
            f"BufferSpecError: {receiver}, tag 4: expected a message of at most {count - 1} x float32, "
            f"got {count} x float32. {LONGER}"
            for count in (10, 100_000)
        ]
        assert found.pop("wrong_type") == [
            *(
                f"BufferSpecError: {receiver}, tag 4: expected a message of at most {count} x int32, "
                f"got {count} x float32. {LONGER}"
                for count in (10, 100_000)
            ),
            f"BufferSpecError: rank {rank}: Send, send buffer: expected elements that can be encoded, got a derived "
            "datatype. Pass codec='none' here and on the other side.",
            "BufferSpecError: codec split: expected elements of type float16 or bfloat16 or float32 or float64, "
            f"got int32. Choose a codec for this type: {ENCODED}",
        ]
        assert found.pop("cancelled_requests") == [
            "SpecError: Cancel: expected the request of a message, got that of a collective. "
            "Wait for it: other ranks count on this one."
        ]
        assert found.pop("too_long_without_frames") == [
            f"BufferSpecError: {receiver}, tag 4: expected a message of at most {count - 1} x float32, "
            f"got {4 * count} bytes. {LONGER}"
            for count in (10, 100_000)
        ]
        assert found.pop("failing") == failures(rank, ranks)
        assert not any(found.values())


def failures(rank: int, ranks: int) -> list[str]:
    """Return the errors of a rank when a codec fails on rank 0: twice in encode, twice in decode."""
    peer = (
        f"PeerError: rank {rank}: Recv from rank 0, tag 6, chunk 2: expected the sender to encode it, "
        "got on rank 0 OSError: no more. Fix the error on that rank; the communicator stays usable."
    )
    received = peer if rank == 1 % ranks else "no error"
    sent, decoded = ("OSError: no more",) * 2 if rank == 0 else ("no error",) * 2
    return [received, sent] * 2 + [decoded, "no error"] * 2
