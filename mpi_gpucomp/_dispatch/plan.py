"""What a call may say besides mpi4py's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi_gpucomp._tuning.tuner import Trial
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.schedule.ir import Algorithm
    from mpi_gpucomp.transport.rails import Rails

__all__ = ["CallOptions", "Calls", "Choice", "Settings"]


class CallOptions(TypedDict, total=False):
    """How one collective is carried out; all ranks say the same."""

    codec: str | Codec | None
    """A codec for this call."""
    role: str | None
    """What the data are, for the codec that the communicator has for that."""
    algorithm: str | Algorithm | None
    """One of `python -m mpi_gpucomp algorithms`, the path of an MSCCL XML file, or a schedule."""
    chunk: int | None
    """Bytes of a chunk."""
    name: str | None
    """By which ranks may start it in any order among others with names."""
    priority: int
    """Higher ones are served first on this rank."""
    replicate: bool
    """Of a broadcast: whether the root, too, ends with what a lossy codec makes of its elements."""
    callback: Callable[[], None] | None
    """Called, by the thread that notices, when it is complete."""
    on_error: Callable[[BaseException], None] | None
    """Called in its place, with what went wrong, if it is over and not complete; not by MPI's own."""


class Calls:
    """How many calls a choice still holds for; all ranks count the same ones."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        """Begin to count down."""
        self.left = left


class Choice(NamedTuple):
    """What was chosen for a call."""

    codec: Codec | None
    algorithm: Algorithm | None
    """None for MPI's own."""
    piece: int = 0
    """Elements of a chunk."""
    on: MPI.Intracomm | None = None
    """Where MPI's own is called, if not where it usually is."""
    trial: Trial[Any] | None = None
    """What wants to know how long the call has taken."""
    lasting: Calls | None = None
    """How many such calls go this way from now on, whatever is in them."""


class Settings(NamedTuple):
    """What a communicator was made with."""

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
