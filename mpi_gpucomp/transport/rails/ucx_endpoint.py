"""What rails need of UCX, through ucxx: a worker of its own for each path, and one endpoint.

A worker of its own is what makes a path quiet for good: tags, receives and memory of one path are nobody else's, and
once the worker is gone nothing can be written any more. Nothing here runs by itself: whoever has a plug moves it.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections import deque
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi_gpucomp.transport.rails.frames import Payload

__all__ = ["Plug", "PlugError", "Sent", "card_of", "context", "rdma_port", "version"]

RENDEZVOUS_BYTES = "65536"
"""Longer messages wait until there is room for them, and need no copy."""
MOST_STEPS = 16
"""That UCX takes at once to let go of a path; it was never seen to need more than two."""
_CARD = struct.Struct("<Q")


class PlugError(Exception):
    """UCX cannot go on; the text says why."""


@contextmanager
def _unchanged() -> Iterator[None]:
    """Undo what the import does to the environment: UCX would complain of it on standard output."""
    before = {name for name in os.environ if name.startswith("UCX_")}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("UCX_") and name not in before]:
            del os.environ[name]


def _use_what_is_loaded() -> None:
    """Keep ucxx's wheel from loading a UCX where MPI has brought one: a process can have one of that name."""
    if "/libucp.so" in Path("/proc/self/maps").read_text():
        with suppress(ImportError):
            import libucx

            libucx.load_library = list


@cache
def _library() -> Any:
    """Import ucxx's lower half, or return why not."""
    with _unchanged():
        try:
            _use_what_is_loaded()
            from ucxx._lib import arr, libucxx
        except (ImportError, OSError) as error:
            return str(error)
    libucxx.Array = arr.Array
    return libucxx


def version() -> tuple[bool, str]:
    """Say whether there is a UCX to use, and which version, or why not."""
    library = _library()
    if isinstance(library, str):
        return False, library
    return True, ".".join(map(str, library.get_ucx_version()))


def rdma_port(device: str | None) -> str | None:
    """Return the RDMA device and port behind a network device, as UCX names it: mlx5_0:1."""
    folder = Path("/sys/class/net") / (device or "none")
    try:
        name = min(entry.name for entry in (folder / "device/infiniband").iterdir())
        return f"{name}:{int((folder / 'dev_port').read_text()) + 1}"
    except (OSError, ValueError):
        return None


@cache
def context(devices: str, transports: str) -> Any:
    """Return UCX on some devices and no others, for the length of the process."""
    library = _library()
    options = {"NET_DEVICES": devices, "TLS": transports, "RNDV_THRESH": RENDEZVOUS_BYTES}
    try:
        return library.UCXContext(options, (library.Feature.TAG, library.Feature.WAKEUP))
    except library.UCXError as error:
        raise PlugError(f"UCX cannot use {devices} ({transports}): {error}") from error


def card_of(data: bytes) -> tuple[int, bytes]:
    """Read a plug's card: the tag that it listens to, and its address."""
    return _CARD.unpack_from(data)[0], data[_CARD.size :]


class Sent(NamedTuple):
    """Something on its way in or out: UCX's request, and the memory, which stays until that is over."""

    request: Any
    memory: Payload

    def over(self) -> bool:
        """Say whether UCX is through with it; raise what went wrong."""
        if not self.request.completed:
            return False
        try:
            self.request.check_error()
        except Exception as error:
            raise PlugError(_said(error)) from error
        return True


class Plug:
    """A worker, and the endpoint of the peer that it talks to."""

    def __init__(self, devices: str, transports: str) -> None:
        """Be ready for somebody to connect to."""
        self._library = _library()
        self._worker = self._library.UCXWorker(context(devices, transports), False, False)
        self._worker.init_blocking_progress_mode()
        # Nobody else knows it: what a stranger sends to this worker matches no receive.
        self._own, self._theirs = secrets.randbits(63) << 1, 0
        self._endpoint: Any = None
        self._pending: deque[Sent] = deque()

    @property
    def card(self) -> bytes:
        """What the peer needs to know."""
        return _CARD.pack(self._own) + bytes(self._worker.address.tobytes())

    def connect(self, card: bytes) -> None:
        """Join the plug that a card is of."""
        self._theirs, address = card_of(card)
        try:
            where = self._library.UCXAddress.create_from_buffer(address)
            self._endpoint = self._worker.create_endpoint_from_worker_address(where, True)
        except Exception as error:
            raise PlugError(_said(error)) from error

    def fileno(self) -> int:
        """Return what becomes readable when there is something to do, once `idle` has said that there is nothing."""
        return int(self._worker.epoll_file_descriptor)

    def send(self, memory: Payload, *, payload: bool) -> Sent:
        """Start to send; payloads are apart from what announces them."""
        return self._started(self._endpoint.tag_send, memory, self._theirs | payload)

    def receive(self, memory: Payload, *, payload: bool) -> Sent:
        """Start to receive."""
        return self._started(self._endpoint.tag_recv, memory, self._own | payload)

    def _started(self, start: Any, memory: Payload, tag: int) -> Sent:
        try:
            made = Sent(start(self._library.Array(memory), self._library.UCXXTag(tag)), memory)
        except Exception as error:
            raise PlugError(_said(error)) from error
        while self._pending and self._pending[0].request.completed:
            self._pending.popleft()
        self._pending.append(made)
        return made

    def move(self) -> bool:
        """Let UCX do what can be done at once; say whether there was something."""
        moved = False
        while self._worker.progress_once():
            moved = True
        return moved

    def idle(self) -> bool:
        """Say whether there is nothing to do: what comes from now on shows at the file."""
        return bool(self._worker.arm())

    def check(self) -> None:
        """Raise if UCX has given the endpoint up."""
        try:
            self._endpoint.raise_on_error()
        except Exception as error:
            raise PlugError(_said(error)) from error

    def cut(self) -> None:
        """Have everything cancelled that is on its way; `is_quiet` says when it is."""
        with suppress(Exception):  # an endpoint that has failed is closed already
            self._endpoint.close_blocking()

    def is_quiet(self) -> bool:
        """Say whether UCX has let go of all memory; from then on the worker must not be moved."""
        for _ in range(MOST_STEPS):
            self._pending = deque(one for one in self._pending if not one.request.completed)
            if not self._pending:
                return True
            # An endpoint that has failed leaves its receives behind, with the worker. No more steps than it takes: UCX
            # (1.20) has crashed when a worker was moved on and on after its endpoint had been closed.
            self._worker.cancel_inflight_requests()
            self._worker.progress_once()
        return False


def _said(error: Exception) -> str:
    return f"UCX: {error or type(error).__name__}".lower().replace("ucx:", "UCX:")
