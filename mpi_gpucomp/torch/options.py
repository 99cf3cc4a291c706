"""What a process group is told by `pg_options`: which codec for which kind of traffic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpi_gpucomp.codec import find
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.comm.options import Options as How

__all__ = ["ROLES", "Options"]

ANY_LENGTH = 1 << 62
ROLES = {
    "parameters": "broadcast, all_gather, scatter and gather",
    "gradients": "all_reduce, reduce and reduce_scatter",
    "activations": "all_to_all",
}
"""What the operations of torch.distributed usually carry, for a codec of its own each."""


@dataclass(frozen=True)
class Options:
    """The policy of one group; without one everything is lossless, by codec="auto"."""

    codec: str | Codec = "auto"
    """The codec of whatever has no role below, messages between two ranks too; "none" leaves everything to MPI."""
    roles: Mapping[str, str | Codec] | None = field(default=None)
    """Codecs by what is carried: {"parameters": ..., "gradients": ..., "activations": ...}."""
    exact_root: bool = False
    """Whether the root of a lossy broadcast keeps its exact values, and so differs from the others."""
    chunk: int | None = None
    """Bytes of a chunk; chosen by length and codec if None."""
    small: int = 1 << 15
    """Bytes of the longest message that goes straight to MPI."""
    slots: int = 2
    """How many collectives are under way at once."""

    def __post_init__(self) -> None:
        """Refuse what means nothing here, before any rank waits for another."""
        find(self.codec)
        for role, codec in (self.roles or {}).items():
            find(codec)
            if role not in ROLES:
                raise SpecError(
                    "Options, roles",
                    expected=f"some of {', '.join(ROLES)}",
                    got=repr(role),
                    remedy="Name what the operations carry: " + "; ".join(f"{k}: {v}" for k, v in ROLES.items()) + ".",
                )

    @property
    def straight(self) -> int:
        """Bytes of the longest message that goes straight to MPI: of any, where nothing is ever encoded."""
        codecs = [self.codec, *(self.roles or {}).values()]
        return ANY_LENGTH if all(find(codec).name == "none" for codec in codecs) else self.small

    def how(self, role: str, *, alike: bool = False) -> How:
        """Return what a call of this role says to the communicator: nothing, where that is what it does anyway.

        `alike` is for calls that leave all ranks with the same values, unless the policy says otherwise.
        """
        codec = (self.roles or {}).get(role)
        how: How = {} if codec is None else {"role": role}
        if alike and not self.exact_root and not find(codec or self.codec).lossless:
            how["alike"] = True
        return how
