"""The communicator: how it is made and freed, what it was made with, and what it tells of itself.

What it does is in `Methods`.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpi_gpucomp.codec import find
from mpi_gpucomp.comm.caller import Caller
from mpi_gpucomp.comm.methods import Methods
from mpi_gpucomp.comm.options import Settings
from mpi_gpucomp.comm.p2p import PointToPoint
from mpi_gpucomp.comm.request import Request
from mpi_gpucomp.comm.stats import RailStats, Stats, rails_of, stats_of
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.transport.rails import Rails, chosen

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from typing_extensions import Unpack

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.comm.options import Options

__all__ = ["Communicator"]


class Communicator(Methods):
    """The ranks of an MPI communicator, on duplicates of it; what it does not define itself is mpi4py's."""

    def __init__(
        self,
        comm: MPI.Intracomm | Communicator,
        codec: str | Codec = "auto",
        *,
        roles: Mapping[str, str | Codec] | None = None,
        chunk: int | None = None,
        slots: int = 2,
        small: int = 1 << 15,
        timeout: float | None = 60.0,
        plans: str | None = None,
        rails: str | Rails | None = None,
        monitor: bool | None = None,
    ) -> None:
        """Let all ranks of `comm` make one, with the same settings.

        `roles` gives codecs for kinds of data, such as {"gradients": "bound:rel=1e-3"}; calls say role="gradients".
        Messages of at most `small` bytes go straight to MPI. So many `slots` run at once, in chunks of `chunk` bytes
        (None: 256 KiB to 2 MiB, by length and codec).
        Ranks that wait for each other in a circle get a DeadlockError after `timeout` seconds (None: never).
        `plans` is a directory of synthesised schedules; those made for nodes like these are used where they fit.
        `rails` are network devices, such as "eth0,eth1": all goes over the first, and over the next when that one
        breaks (None: as MPI_GPUCOMP_RAILS says; "": over MPI).
        `monitor` says whether to record what goes on (None: as the environment says, which is yes by default).
        """
        paths = chosen(rails) or ""
        self._settings = Settings(codec, dict(roles or {}), chunk, slots, small, timeout, plans, paths, monitor)
        self._plain: MPI.Intracomm = (comm._plain if isinstance(comm, Communicator) else comm).Dup()
        self._freed = False
        self.rank, self.size = self._plain.rank, self._plain.size
        self._caller = Caller(self._plain, self._settings)
        self._p2p = PointToPoint(self._plain, self._caller, self._settings)
        self._quick, self._engine = self._caller.straight.quick, self._caller.engine
        self._watch = self._engine.watch
        self._deltas = count()

    def __enter__(self) -> Communicator:
        """Use it for the length of a `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free it, unless something went wrong and peers may not come."""
        if error is None:
            self.Free()

    def __getattr__(self, name: str) -> Any:
        """Leave everything else to mpi4py, on our duplicate."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._plain, name)

    def Free(self) -> None:
        """End the background thread and free the duplicates: all ranks do, when nothing is under way.

        One that cannot be used any more is left to the end of MPI: not all ranks would come.
        """
        broken = self._engine.broken is not None
        if self._freed:
            return
        self._close(broken=broken)
        if not broken:
            self._plain.Free()

    def _close(self, *, broken: bool) -> None:
        self._freed = True
        self._caller.close(broken=broken)
        self._p2p.close(broken=broken)
        self._quick.clear()
        self._engine.broken = self._engine.broken or SpecError(
            "communicator",
            expected="one that is in use",
            got="one that was freed",
            remedy="Make a new one.",
            rank=self.rank,
        )

    def Dup(self) -> Communicator:
        """Make another one with the same ranks and settings."""
        return self._like(self._plain)

    def Split(self, color: int = 0, key: int = 0) -> Communicator | None:
        """Make one for each color, with the same settings; None where the color is MPI.UNDEFINED."""
        return self._take_over(self._plain.Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Communicator | None:
        """Make one for each machine (MPI.COMM_TYPE_SHARED) or the like."""
        return self._take_over(self._plain.Split_type(split_type, key, info))

    def Shrink(self) -> Communicator:
        """Make one of the ranks that are still alive (an MPI with ULFM)."""
        self._close(broken=True)
        survivors = self._take_over(self._plain.Shrink())
        assert survivors is not None, "this rank is alive"
        return survivors

    def _take_over(self, part: MPI.Comm) -> Communicator | None:
        if not isinstance(part, MPI.Intracomm) or part == MPI.COMM_NULL:
            return None
        try:
            return self._like(part)
        finally:
            part.Free()

    def _like(self, comm: MPI.Intracomm) -> Communicator:
        return type(self)(comm, **self._settings._asdict())

    def tune(self, *methods: str) -> None:
        """Measure now what codec="auto" decides these methods by, such as "Bcast": all ranks call it together.

        Blocking calls do so the first time by themselves. Those with an I cannot wait for others, and are MPI's own
        until their method is known.
        """
        self._caller.tune(methods or ("Bcast", "Allreduce"))

    def settle(self, method: str, /, *args: Any, **options: Unpack[Options]) -> str:
        """Call a method, by its name, until codec="auto" has found the fastest way for such a message; return which.

        All ranks do, together. Without it the first two or three dozen calls of each size take the ways in turns, and
        sums, which are to be the same in every call, go by what the model expects.
        """
        return self._caller.settle(method, args, options)

    # Names

    def register(self, name: str, collective: str, /, **options: Unpack[Options]) -> None:
        """Give a collective a name and options, to be run by `run` in any order among others with names."""
        self._caller.names.register(name, collective, options)

    def run(self, name: str, /, *args: Any, **options: Unpack[Options]) -> Request:
        """Start a registered collective on buffers; its arguments are those of mpi4py's method."""
        return self._caller.run(name, args, options)

    def completed(self) -> list[str]:
        """Return the names that were completed since the last time somebody asked, in that order."""
        self._caller.crank.turn()
        return self._caller.names.completed()

    def stats(self) -> Stats:
        """Say what has gone over the wire so far, of what does not go straight to MPI."""
        return stats_of(self._caller)

    def codec_for(self, role: str | None = None) -> Codec | None:
        """Return the codec of a role, if it has one; without a role, that of everything else."""
        codec = self._settings.codec if role is None else self._settings.roles.get(role)
        return None if codec is None else find(codec)

    def rail_stats(self) -> RailStats | None:
        """Say what has become of the rails; None where there are none."""
        return rails_of(self._caller)
