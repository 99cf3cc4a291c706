"""Endpoints of UCX, on one device: RDMA where available, TCP otherwise.

Each endpoint has its own UCX worker (through ucxx). So it closes for good: its tags, receives and memory are shared
with no other, and once the worker is gone nothing can be written any more. Nothing progresses by itself: the owner of
an endpoint calls `progress`.
"""

from __future__ import annotations

import os
import secrets
import struct
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    Payload = bytes | bytearray | memoryview

__all__ = ["UcxEndpoint", "UcxError", "UcxRequest", "context", "rdma_port", "unpack_address", "version"]

RENDEZVOUS_BYTES = "65536"
"""UCX's rendezvous threshold: longer messages need no copy."""
CLOSE_STEPS = 16
"""Progress calls per attempt to cancel an endpoint's requests; it was never seen to need more than two."""
KEPT_REQUESTS = 64
"""Requests that are kept before those that have completed are dropped."""
_TAG = struct.Struct("<Q")


class UcxError(Exception):
    """UCX failed; the text gives the reason."""


@contextmanager
def _restore_environment() -> Iterator[None]:
    """Undo the import's changes to the environment: UCX would warn about them on standard output."""
    before = {name for name in os.environ if name.startswith("UCX_")}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("UCX_") and name not in before]:
            del os.environ[name]


def _use_loaded_library() -> None:
    """Keep ucxx's wheel from loading a second UCX where MPI has loaded one: a process can have one of that name."""
    if "/libucp.so" in FilePath("/proc/self/maps").read_text():
        with suppress(ImportError):
            import libucx

            libucx.load_library = list


@cache
def _library() -> Any:
    """Import ucxx's low-level module, or return the reason for a failure."""
    with _restore_environment():
        try:
            _use_loaded_library()
            from ucxx._lib import arr, libucxx
        except (ImportError, OSError) as error:
            return str(error)
    libucxx.Array = arr.Array
    return libucxx


def version() -> tuple[bool, str]:
    """Return whether UCX is available, and its version or the reason."""
    library = _library()
    if isinstance(library, str):
        return False, library
    return True, ".".join(map(str, library.get_ucx_version()))


def rdma_port(device: str | None) -> str | None:
    """Return the RDMA device and port of a network device, as UCX names it: mlx5_0:1."""
    folder = FilePath("/sys/class/net") / (device or "none")
    try:
        name = min(entry.name for entry in (folder / "device/infiniband").iterdir())
        return f"{name}:{int((folder / 'dev_port').read_text()) + 1}"
    except (OSError, ValueError):
        return None


@cache
def context(devices: str, transports: str) -> Any:
    """Return the process's UCX context on some devices only."""
    library = _library()
    options = {"NET_DEVICES": devices, "TLS": transports, "RNDV_THRESH": RENDEZVOUS_BYTES}
    try:
        return library.UCXContext(options, (library.Feature.TAG, library.Feature.WAKEUP))
    except library.UCXError as error:
        raise UcxError(f"UCX cannot use {devices} ({transports}): {error}") from error


def unpack_address(blob: bytes) -> tuple[int, bytes]:
    """Return the tag and the worker address of an address blob."""
    return _TAG.unpack_from(blob)[0], blob[_TAG.size :]


class UcxRequest(NamedTuple):
    """A posted send or receive, and its memory, which is kept alive until UCX has completed it."""

    request: Any
    memory: Payload

    def done(self) -> bool:
        """Return True if UCX has completed it; raise its error."""
        if not self.request.completed:
            return False
        try:
            self.request.check_error()
        except Exception as error:
            raise UcxError(_reason(error)) from error
        return True


class UcxEndpoint:
    """A worker, and the endpoint of one peer."""

    def __init__(self, devices: str, transports: str) -> None:
        """Create a worker that a peer can connect to."""
        self._library = _library()
        try:
            self._worker = self._library.UCXWorker(context(devices, transports), False, False)
            self._worker.init_blocking_progress_mode()
        except self._library.UCXError as error:
            raise UcxError(_reason(error)) from error
        # A secret tag: messages of unauthenticated senders match no receive of this worker.
        self._own_tag, self._peer_tag = secrets.randbits(63) << 1, 0
        self._endpoint: Any = None
        self._pending: list[UcxRequest] = []

    @property
    def address_blob(self) -> bytes:
        """Return what the peer needs to connect: our tag and worker address."""
        return _TAG.pack(self._own_tag) + bytes(self._worker.address.tobytes())

    def connect(self, blob: bytes) -> None:
        """Connect to the peer of an address blob."""
        self._peer_tag, address = unpack_address(blob)
        try:
            where = self._library.UCXAddress.create_from_buffer(address)
            self._endpoint = self._worker.create_endpoint_from_worker_address(where, True)
        except Exception as error:
            raise UcxError(_reason(error)) from error

    def fileno(self) -> int:
        """Return the descriptor that becomes readable on events, once `arm` has returned True."""
        return int(self._worker.epoll_file_descriptor)

    def send(self, memory: Payload, *, control: bool) -> UcxRequest:
        """Post a send; control messages and data have separate tags."""
        return self._post(self._endpoint.tag_send, memory, self._peer_tag | control)

    def receive(self, memory: Payload, *, control: bool) -> UcxRequest:
        """Post a receive."""
        return self._post(self._endpoint.tag_recv, memory, self._own_tag | control)

    def _post(self, start: Any, memory: Payload, tag: int) -> UcxRequest:
        try:
            request = UcxRequest(start(self._library.Array(memory), self._library.UCXXTag(tag)), memory)
        except Exception as error:
            raise UcxError(_reason(error)) from error
        if len(self._pending) >= KEPT_REQUESTS:
            self._drop_completed()
        self._pending.append(request)
        return request

    def progress(self) -> bool:
        """Progress the worker; return True if anything happened."""
        moved = False
        while self._worker.progress_once():
            moved = True
        return moved

    def arm(self) -> bool:
        """Arm the event descriptor; return False if there are events to progress first."""
        return bool(self._worker.arm())

    def check(self) -> None:
        """Raise if the endpoint has failed."""
        try:
            self._endpoint.raise_on_error()
        except Exception as error:
            raise UcxError(_reason(error)) from error

    def close(self) -> None:
        """Cancel everything in flight; `poll_closed` tests for the completion."""
        with suppress(Exception):  # a failed endpoint is already closed
            self._endpoint.close_blocking()

    def poll_closed(self) -> bool:
        """Return True if UCX has released all memory; the worker must not be progressed afterwards."""
        for _ in range(CLOSE_STEPS):
            self._drop_completed()
            if not self._pending:
                return True
            # A failed endpoint leaves its receives to the worker. No more steps than needed: UCX (1.20) has crashed
            # when a worker was progressed repeatedly after its endpoint had been closed.
            self._worker.cancel_inflight_requests()
            self._worker.progress_once()
        return False

    def _drop_completed(self) -> None:
        self._pending = [one for one in self._pending if not one.request.completed]


def _reason(error: Exception) -> str:
    return f"UCX: {error or type(error).__name__}".lower().replace("ucx:", "UCX:")
