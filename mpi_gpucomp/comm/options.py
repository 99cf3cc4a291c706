"""What a call may say besides mpi4py's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypedDict

if TYPE_CHECKING:
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.schedule.ir import Algorithm

__all__ = ["Choice", "Options", "Settings"]


class Options(TypedDict, total=False):
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
    callback: Callable[[], None] | None
    """Called, by the thread that notices, when it is complete."""


class Choice(NamedTuple):
    """What was chosen for a call."""

    codec: Codec | None
    algorithm: Algorithm | None
    """None for MPI's own."""
    piece: int = 0
    """Elements of a chunk."""


class Settings(NamedTuple):
    """What a communicator was made with."""

    codec: str | Codec
    roles: dict[str, str | Codec]
    chunk: int
    slots: int
    small: int
    timeout: float | None
