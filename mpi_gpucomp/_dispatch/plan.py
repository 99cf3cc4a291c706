"""The plan of a call: how it will run, and why. The only decision record of the library."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi_gpucomp._call.calls import Call
    from mpi_gpucomp._tuning.tuner import Candidate, Race
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.schedule.ir import Algorithm
    from mpi_gpucomp.transport.rails import Rails

__all__ = ["FOREVER", "Lifetime", "Plan", "Route", "Settings"]

FOREVER = 1 << 62
"""A lifetime without end."""


class Route(Enum):
    """Who runs a call."""

    PASSTHROUGH = "native MPI"
    ENGINE = "engine"


class Lifetime:
    """How many further calls a plan holds for; counted down by the calls that use it, alike on all ranks."""

    __slots__ = ("ttl",)

    def __init__(self, ttl: int = FOREVER) -> None:
        """Hold for `ttl` calls."""
        self.ttl = ttl


@dataclass(frozen=True, slots=True)
class Plan:
    """How a call will run; equal on all ranks."""

    route: Route
    why: str
    """The reason for this plan, in one sentence."""
    codec: Codec | None = None
    algorithm: Algorithm | None = None
    """The schedule that the engine runs."""
    chunk_bytes: int = 0
    comm: MPI.Intracomm | None = None
    """The communicator to pass the call through on; None for the default."""
    wire: str = "mpi"
    """What carries the engine's messages, and why."""
    race: Race[Candidate] | None = None
    """The exploration that this call is a sample of."""
    lifetime: Lifetime | None = None
    """How long calls with the same signature keep this plan, whatever their data."""

    def chunk_elements(self, call: Call) -> int:
        """Return the elements of a chunk."""
        return max(1, self.chunk_bytes // call.blocks.buffer.dtype.itemsize)

    def signature(self, call: Call) -> str:
        """Describe the call and its plan: what all ranks must agree on."""
        codec = f", codec {self.codec.spec}" if self.codec else ""
        if self.algorithm is None:
            return f"{call.signature}{codec}, native MPI"
        return f"{call.signature}{codec}, algorithm {self.algorithm.name}, chunk {self.chunk_bytes}"

    @property
    def summary(self) -> str:
        """Describe the plan on one line."""
        if self.algorithm is None or self.codec is None:
            return f"native MPI, {self.comm.Get_name() if self.comm is not None else 'default'}"
        return f"{self.algorithm.name}, {self.codec.spec}, chunks of {self.chunk_bytes >> 10} KiB"

    def __str__(self) -> str:
        """Describe the plan on a few lines."""
        if self.route is Route.PASSTHROUGH:
            algorithm = f", algorithm {self.comm.Get_name()}" if self.comm is not None else ""
            lines = [f"route: native MPI{algorithm}"]
        else:
            assert self.algorithm is not None and self.codec is not None
            lines = [
                f"route: engine over {self.wire}",
                f"algorithm: {self.algorithm.name}",
                f"codec: {self.codec.spec}",
                f"chunk: {self.chunk_bytes} bytes",
            ]
        return "\n".join([*lines, f"why: {self.why}"])


class Settings(NamedTuple):
    """The arguments that a communicator was made with."""

    codec: str | Codec
    roles: dict[str, str | Codec]
    chunk: int | None
    slots: int
    passthrough_bytes: int
    timeout: float | None
    plans: str | None = None
    """A directory of synthesised schedules."""
    rails: Rails | str = ""
    """Empty for none."""
    monitor: bool | None = None
    wire: str | None = None
    """auto, mpi or tcp; None for what the environment says."""
