"""What an algorithm costs on the wire, counted from its steps."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.schedule.fault import Spot
from mpi_gpucomp.schedule.order import executable, paired

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm

__all__ = ["Traffic", "steps_and_bytes"]


class Traffic(NamedTuple):
    """The cost of one loop; bytes are a share of its `chunks` chunks, and those of the rank that has most to do."""

    steps: int
    """The longest chain of messages of which each waits for the one before."""
    messages: int
    """The most messages that one rank sends."""
    sent: Fraction
    """The most bytes that one rank sends."""
    received: Fraction
    """The most bytes that one rank receives."""


def steps_and_bytes(algorithm: Algorithm) -> Traffic:
    """Count the steps, messages and bytes of an algorithm that has passed its check."""
    sent, received = ([0] * algorithm.ranks for _ in range(2))
    messages = [0] * algorithm.ranks
    for rank, program in enumerate(algorithm.programs):
        for _, _, step in program.steps():
            sent[rank] += step.count * step.sends
            received[rank] += step.count * step.receives
            messages[rank] += step.sends
    share = (Fraction(max(counts), algorithm.chunks) for counts in (sent, received))
    return Traffic(_longest_chain(algorithm), max(messages), *share)


def _longest_chain(algorithm: Algorithm) -> int:
    pairs = paired(algorithm)
    length: dict[Spot, int] = {}
    for spot in executable(algorithm, pairs):
        step = algorithm.programs[spot.rank].lanes[spot.lane].steps[spot.step]
        before = [length[Spot(spot.rank, *other)] for other in step.after]
        if spot.step:
            before.append(length[spot._replace(step=spot.step - 1)])
        if spot in pairs.send_of:
            before.append(length[pairs.send_of[spot]] + 1)
        length[spot] = max(before, default=0)
    return max(length.values(), default=0)
