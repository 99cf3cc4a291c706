"""Messages through shared memory, between the ranks of one host; without MPI."""

from __future__ import annotations

import ctypes
import secrets
import tempfile
from typing import TYPE_CHECKING

from mpi_gpucomp.core.library import core
from mpi_gpucomp.core.wire import Wire
from mpi_gpucomp.errors import RankFailedError

if TYPE_CHECKING:
    from mpi_gpucomp.transport.bootstrap import Bootstrap

__all__ = ["ShmWire"]

LARGEST_TAG = (1 << 31) - 1
KEY_BYTES, TEXT_BYTES = 16, 1024
DEFAULT_RING_BYTES = 0


class ShmWire(Wire):
    """Messages with the other ranks of a host."""

    def __init__(self, bootstrap: Bootstrap, *, timeout: float = 30.0, single_copy: bool = True) -> None:
        """Connect all ranks: collective. With `single_copy`, long messages are copied once where the kernel permits."""
        key = bootstrap.allgather(f"{tempfile.gettempdir()}/gpucomp-{secrets.token_hex(KEY_BYTES)}".encode())[0]
        wire = core().gc_shm_create(key, bootstrap.rank, bootstrap.size, DEFAULT_RING_BYTES, single_copy)
        bootstrap.allgather(b"")
        attached = core().gc_shm_attach(wire, int(timeout * 1e9)) == 0
        faults = bootstrap.allgather(b"" if attached else self._text(wire))
        if any(faults):
            core().gc_wire_free(wire)
            raise RankFailedError(
                "shared memory",
                expected="all ranks on one host, connected",
                got="; ".join(f"rank {rank}: {text.decode()}" for rank, text in enumerate(faults) if text),
                remedy="Start all ranks on one host, with the same temporary directory.",
                rank=bootstrap.rank,
            )
        super().__init__(wire, bootstrap.rank, bootstrap.size, LARGEST_TAG)
        self.kind, self.why = "shm", "all ranks are on one host"

    @staticmethod
    def _text(wire: int) -> bytes:
        text = ctypes.create_string_buffer(TEXT_BYTES)
        core().gc_wire_fault(wire, text, TEXT_BYTES)
        return text.value or b"the connection timed out"

    def close(self) -> None:
        """Leave, once everything that was sent has arrived."""
        self._leave(abandon=False)

    def abandon(self) -> None:
        """Leave at once: peers may be gone."""
        self._leave(abandon=True)

    def _leave(self, *, abandon: bool) -> None:
        core().gc_close(self.handle, abandon)
        while not core().gc_closed(self.handle):
            self.run(1e-3)
