"""A path over a UCX endpoint, on one device: RDMA where available, TCP otherwise.

Each path has its own UCX worker (through ucxx). So a path closes for good: its tags, receives and memory are shared
with no other, and once the worker is gone nothing can be written any more. Nothing progresses by itself: the owner of
an endpoint calls `progress`.

A packet is a message with the header and, if there is a payload, a second one, received directly into its destination.
UCX reports little of a silent network and nothing of a hung peer. So the socket of the handshake stays open as a side
channel: it is probed together with the path, and breaks when the peer's process ends.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections import deque
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi_gpucomp.transport.rails.link import Path
from mpi_gpucomp.transport.rails.sequence import HEADER_BYTES, PING, PacketHeader
from mpi_gpucomp.transport.rails.tcp import tcp_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpi_gpucomp.transport.rails.discovery import Rail
    from mpi_gpucomp.transport.rails.link import RailLink
    from mpi_gpucomp.transport.rails.loop import EventLoop
    from mpi_gpucomp.transport.rails.sequence import PathId, Payload

__all__ = ["UcxEndpoint", "UcxError", "UcxPath", "UcxRequest", "context", "rdma_port", "unpack_address", "version"]

RENDEZVOUS_BYTES = "65536"
"""UCX's rendezvous threshold: longer messages need no copy."""
CLOSE_STEPS = 16
"""Progress calls per attempt to cancel a path's requests; it was never seen to need more than two."""
MAX_SENDS, MAX_SEND_BYTES = 64, 1 << 22
"""What UCX is given at once; urgent packets queue behind it."""
POSTED_HEADERS = 16
"""Receives posted for headers."""
MAX_ROUNDS = 32
"""Progress rounds of a path before the others are served."""
PROBE, REPLY = b"?", b"!"
MAX_REPLIES = 8
"""Replies on the side channel without any packet over UCX, after which UCX is considered stuck."""
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
        self._worker = self._library.UCXWorker(context(devices, transports), False, False)
        self._worker.init_blocking_progress_mode()
        # A secret tag: messages of unauthenticated senders match no receive of this worker.
        self._own_tag, self._peer_tag = secrets.randbits(63) << 1, 0
        self._endpoint: Any = None
        self._pending: deque[UcxRequest] = deque()

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

    def send(self, memory: Payload, *, payload: bool) -> UcxRequest:
        """Post a send; headers and payloads have separate tags."""
        return self._post(self._endpoint.tag_send, memory, self._peer_tag | payload)

    def receive(self, memory: Payload, *, payload: bool) -> UcxRequest:
        """Post a receive."""
        return self._post(self._endpoint.tag_recv, memory, self._own_tag | payload)

    def _post(self, start: Any, memory: Payload, tag: int) -> UcxRequest:
        try:
            request = UcxRequest(start(self._library.Array(memory), self._library.UCXXTag(tag)), memory)
        except Exception as error:
            raise UcxError(_reason(error)) from error
        while self._pending and self._pending[0].request.completed:
            self._pending.popleft()
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
            self._pending = deque(one for one in self._pending if not one.request.completed)
            if not self._pending:
                return True
            # A failed endpoint leaves its receives to the worker. No more steps than needed: UCX (1.20) has crashed
            # when a worker was progressed repeatedly after its endpoint had been closed.
            self._worker.cancel_inflight_requests()
            self._worker.progress_once()
        return False


def _reason(error: Exception) -> str:
    return f"UCX: {error or type(error).__name__}".lower().replace("ucx:", "UCX:")


class _ArrivingPacket(NamedTuple):
    """A packet whose payload is in flight."""

    header: PacketHeader
    buffer: memoryview | None
    """The destination of the payload; None to discard it."""
    payload: UcxRequest | None


class UcxPath(Path):
    """An endpoint of a peer, and the side channel."""

    def __init__(
        self,
        path_id: PathId,
        side_channel: socket.socket,
        endpoint: UcxEndpoint,
        rail: Rail,
        link: RailLink,
        loop: EventLoop,
    ) -> None:
        """Take over a connected endpoint, and the socket of its handshake as the side channel."""
        super().__init__(path_id)
        self._side_channel, self._endpoint, self._rail, self._link, self._loop = (
            side_channel,
            endpoint,
            rail,
            link,
            loop,
        )
        self._last_seen, self._kernel_acked = time.monotonic(), 0.0
        self._replies = 0
        """Replies on the side channel since the last packet over UCX."""
        self._sends: deque[UcxRequest] = deque()
        self._unsent = 0
        self._headers: deque[UcxRequest] = deque()
        self._arriving: deque[_ArrivingPacket] = deque()
        self._on_closed: Callable[[], None] | None = None
        self.open = True
        for _ in range(POSTED_HEADERS):
            self._headers.append(endpoint.receive(bytearray(HEADER_BYTES), payload=False))
        loop.register(side_channel, self._on_side_channel)
        loop.register(endpoint, self._on_ready)
        self.wake()

    # Sending

    def wake(self) -> None:
        """Schedule a flush."""
        self._loop.schedule_flush(self)

    def send_urgent(self, kind: int, payload: Payload = b"") -> None:
        """Send a packet out of sequence as soon as possible; probes go over the side channel too."""
        super().send_urgent(kind, payload)
        if kind == PING:
            self._send_side_channel(PROBE)

    def flush(self) -> None:
        """Give UCX as much as it may have at once."""
        try:
            while self.open and len(self._sends) < MAX_SENDS and self._unsent < MAX_SEND_BYTES:
                taken = self._link.next_packet(self)
                if taken is None:
                    break
                header, payload = taken
                self._send(header, payload=False)
                if len(payload):
                    self._send(payload, payload=True)
        except UcxError as error:
            self._link.drop_path(self, str(error))
        self._progress()

    def _send(self, memory: Payload, *, payload: bool) -> None:
        self._sends.append(self._endpoint.send(memory, payload=payload))
        self._unsent += len(memory)

    def _count_sent(self) -> None:
        full = len(self._sends) >= MAX_SENDS or self._unsent >= MAX_SEND_BYTES
        while self._sends and self._sends[0].done():
            self._unsent -= len(self._sends.popleft().memory)
        if full and len(self._sends) < MAX_SENDS and self._unsent < MAX_SEND_BYTES:
            self.wake()

    # Receiving

    def _on_ready(self, readable: bool, writable: bool) -> None:
        if self.open:
            self._progress()
        else:
            self.poll_close()

    def _progress(self) -> None:
        """Progress UCX until it is idle, for a bounded number of rounds, and handle the packets that have arrived."""
        try:
            rounds = 0
            while self.open and (self._progress_once() or (self.open and not self._endpoint.arm())):
                rounds += 1
                if rounds == MAX_ROUNDS:
                    self._loop.call_soon(self._progress)
                    break
        except UcxError as error:
            self._link.drop_path(self, str(error))
        if self.open:
            self._link.send_ack(self)

    def _progress_once(self) -> bool:
        """Progress UCX and handle the packets that have arrived; return True if there may be more."""
        moved = self._endpoint.progress()
        self._endpoint.check()
        self._count_sent()
        while self.open and (self._begin_packet() or self._end_packet()):
            pass
        return moved

    def _begin_packet(self) -> bool:
        """Take the next header, if it has arrived, and post a receive for its payload."""
        if not self._headers[0].done():
            return False
        memory = self._headers.popleft().memory
        header = PacketHeader.unpack(memory)
        self._last_seen, self._replies = time.monotonic(), 0
        if header.malformed:
            raise UcxError("malformed packet header")
        self._headers.append(self._endpoint.receive(memory, payload=False))
        buffer = self._link.accept(self, header)
        payload = None
        if header.length:
            where = buffer if buffer is not None else bytearray(header.length)
            payload = self._endpoint.receive(where, payload=True)
        self._arriving.append(_ArrivingPacket(header, buffer, payload))
        return True

    def _end_packet(self) -> bool:
        """Deliver the first arriving packet, if it is complete."""
        if not self._arriving or not (self._arriving[0].payload is None or self._arriving[0].payload.done()):
            return False
        header, buffer, _ = self._arriving.popleft()
        self._last_seen, self._replies = time.monotonic(), 0
        self._link.on_packet(self, header, buffer)
        return True

    # Side channel

    def _send_side_channel(self, byte: bytes) -> None:
        with suppress(OSError):  # a broken one is noticed when it is read
            self._side_channel.send(byte)

    def _on_side_channel(self, readable: bool, writable: bool) -> None:
        try:
            data = self._side_channel.recv(64)
        except BlockingIOError:
            return
        except OSError as error:
            self._link.drop_path(self, (error.strerror or type(error).__name__).lower())
            return
        if not data:
            self._link.drop_path(self, "closed by the peer")
            return
        if PROBE in data:
            self._send_side_channel(REPLY)
        self._replies += data.count(REPLY)

    # Liveness

    def last_seen(self, now: float) -> float:
        """Count acknowledgements of the peer's kernel too, unless its process replies and UCX delivers nothing."""
        if self._replies >= MAX_REPLIES:
            return self._last_seen
        if self.probed > max(self._last_seen, self._kernel_acked):
            info = tcp_info(self._side_channel)
            if info is not None and not (info.unacked or info.unsent):
                self._kernel_acked = now
        return max(self._last_seen, self._kernel_acked)

    def fault(self) -> str | None:
        """Check the device's carrier."""
        return None if self._rail.has_carrier() else f"{self._rail.name} has no carrier"

    def close(self, on_closed: Callable[[], None]) -> None:
        """Cancel everything in flight, which may take UCX a while."""
        self.open, self._on_closed = False, on_closed
        self._loop.unregister(self._side_channel)
        self._side_channel.close()
        self._endpoint.close()
        self.poll_close()

    def poll_close(self) -> None:
        """Test whether UCX has released everything."""
        if self._on_closed is None or not self._endpoint.poll_closed():
            return
        on_closed, self._on_closed = self._on_closed, None
        self._loop.unregister(self._endpoint)
        for kept in (self._sends, self._headers, self._arriving):
            kept.clear()
        del self._endpoint  # and its worker
        on_closed()
