"""UCX under rails: endpoints on one device, RDMA where available and TCP otherwise, and the bridge to the wire.

Each endpoint has its own UCX worker (through ucxx). So it closes for good: its tags, receives and memory are shared
with no other, and once the worker is gone nothing can be written any more. Nothing progresses by itself: the owner of
an endpoint calls `progress`.

A bridge carries the bytes of a path: the wire sees a local socket, whose other end is here. What the wire writes is
sent in messages of UCX, and what arrives is written to the wire. The receiver grants credits for the messages that it
has memory for, so both ends keep a bounded amount. All work is done in the thread of the event loop, which sleeps on
the socket and on the event descriptor of UCX.

UCX reports little of a silent network and nothing of a hung peer. So the socket of the handshake stays open as a side
channel: it is probed while the peer owes a sign of life, and breaks when the peer's process ends. The kernel of the
peer answers for a process that does not; a process that replies there must also reply over UCX. The wire itself does
not time out these paths: this thread may be late, for lack of the interpreter's lock, and the kernel knows better.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import termios
import time
from collections import deque
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpi_gpucomp.transport.rails.loop import EventLoop

    Payload = bytes | bytearray | memoryview

__all__ = [
    "CREDITS",
    "MAX_REPLIES",
    "MESSAGE_BYTES",
    "UcxBridge",
    "UcxEndpoint",
    "UcxError",
    "UcxRequest",
    "context",
    "rdma_port",
    "unpack_address",
    "version",
]

RENDEZVOUS_BYTES = "65536"
"""UCX's rendezvous threshold: longer messages need no copy."""
CLOSE_STEPS = 16
"""Progress calls per attempt to cancel an endpoint's requests; it was never seen to need more than two."""
KEPT_REQUESTS = 64
"""Requests that are kept before those that have completed are dropped."""
_TAG = struct.Struct("<Q")

MESSAGE_BYTES = 1 << 16
"""The longest message, without its prefix."""
CREDITS = 16
"""Data messages that the receiver has memory for; it returns half of them at once."""
POSTED_CONTROLS = 4
"""Receives posted for control messages."""
CREDIT, PROBE, REPLY = b"+", b"?", b"!"
"""Control messages; the side channel carries the last two."""
PROBE_SHARE, TICK_SHARE = 4, 8
"""A probe is sent after this part of the timeout, and its answer looked for in this one."""
MAX_REPLIES = 8
"""Replies on the side channel without any message over UCX, after which the path is given up."""
MAX_ROUNDS = 32
"""Rounds of progress before the other descriptors of the loop are served."""
CLOSE_PERIOD = 0.01
"""Seconds between attempts to close an endpoint."""
_LENGTH = struct.Struct("<I")
_UNACKED = struct.Struct("i")


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


class UcxBridge:
    """A connected endpoint, its side channel, and a socket of the wire."""

    def __init__(
        self,
        endpoint: UcxEndpoint,
        side_channel: socket.socket,
        loop: EventLoop,
        timeout: float,
        *,
        on_life: Callable[[], object],
        on_broken: Callable[[str], None],
        on_closed: Callable[[], object],
    ) -> None:
        """Take over a connected endpoint and the socket of its handshake; `wire_socket` is for the wire.

        `on_life` is called at each sign of life, `on_broken` before a close that the wire does not expect, and
        `on_closed` once UCX has released all memory.
        """
        self._endpoint, self._side_channel, self._loop, self._timeout = endpoint, side_channel, loop, timeout
        self._on_life, self._on_broken, self._on_closed = on_life, on_broken, on_closed
        self._reading, self._blocked = True, False
        """Whether the loop watches for bytes of the wire, and for space in its socket."""
        self._credits, self._consumed = CREDITS, 0
        self._free: list[bytearray] = []
        self._sends: deque[tuple[UcxRequest, bytearray]] = deque()
        self._written = 0
        """Bytes of the first message received that the wire has."""
        self._last_sent = self._last_received = self._last_seen = time.monotonic()
        self._probed = 0.0
        self._probe_unanswered, self._sent_since_probe = False, 0
        """Whether nothing has answered the last probe, and the bytes that followed it on the side channel."""
        self._replies = 0
        """Replies on the side channel since the last message over UCX."""
        self._reply_awaited = self._ticking = False
        self.open, self._cancelled = True, False
        sizes = _LENGTH.size + MESSAGE_BYTES
        self._receives = deque(endpoint.receive(bytearray(sizes), control=False) for _ in range(CREDITS))
        self._controls = deque(endpoint.receive(bytearray(1), control=True) for _ in range(POSTED_CONTROLS))
        self._socket, self.wire_socket = socket.socketpair()
        self._socket.setblocking(False)
        loop.register(side_channel, self._on_side_channel)
        loop.register(endpoint, self._on_endpoint)
        loop.register(self._socket, self._on_socket)
        loop.call_soon(self._progress)

    # Bytes

    def _on_endpoint(self, readable: bool, writable: bool) -> None:
        self._progress()

    def _on_socket(self, readable: bool, writable: bool) -> None:
        if readable and not self._reading:  # the wire has closed its end
            self.close()
            return
        self._blocked = self._blocked and not writable
        self._progress()

    def _progress(self) -> None:
        """Move bytes both ways until there are none; after a bounded number of rounds, continue later."""
        try:
            for _ in range(MAX_ROUNDS):
                if not self.open:
                    return
                moved = self._endpoint.progress()
                self._endpoint.check()
                self._take_controls()
                if not (self._deliver() | self._send() | moved) and self.open and self._endpoint.arm():
                    break
            else:
                self._loop.call_soon(self._progress)
        except UcxError as error:
            self._break(str(error))
        if self.open:
            self._reading = self._can_send
            self._loop.register(self._socket, self._on_socket, reading=self._reading, writing=self._blocked)
            if self._is_waiting and not self._ticking:
                self._ticking = True
                self._loop.call_every(self._timeout / TICK_SHARE, self._tick)

    def _take_controls(self) -> None:
        while self._controls[0].done():
            memory = self._controls.popleft().memory
            kind = bytes(memory)
            self._controls.append(self._endpoint.receive(memory, control=True))
            self._on_message()
            if kind == CREDIT:
                self._credits += CREDITS // 2
            elif kind == PROBE:
                self._endpoint.send(REPLY, control=True)

    def _deliver(self) -> bool:
        """Write what has arrived to the wire; return True if any bytes moved."""
        moved = False
        while self.open and not self._blocked and self._receives[0].done():
            memory = self._receives[0].memory
            (length,) = _LENGTH.unpack_from(memory)
            if not 0 < length <= MESSAGE_BYTES:
                raise UcxError("malformed message")
            rest = memoryview(memory)[_LENGTH.size + self._written : _LENGTH.size + length]
            try:
                count = self._socket.send(rest)
            except BlockingIOError:
                self._blocked = True
                break
            except OSError:  # the wire has closed its end
                self.close()
                break
            moved = True
            self._written += count
            if count == len(rest):
                self._on_delivered()
        return moved

    def _on_delivered(self) -> None:
        """Receive into the memory of the first message again, and return credits."""
        memory, self._written = self._receives.popleft().memory, 0
        self._receives.append(self._endpoint.receive(memory, control=False))
        self._on_message()
        self._consumed += 1
        if self._consumed == CREDITS // 2:
            self._consumed = 0
            self._endpoint.send(CREDIT, control=True)

    @property
    def _can_send(self) -> bool:
        return self._credits > 0 and len(self._sends) < CREDITS

    def _send(self) -> bool:
        """Send what the wire has written, as far as there are credits; return True if any bytes moved."""
        while self._sends and self._sends[0][0].done():
            self._free.append(self._sends.popleft()[1])
        moved = False
        while self.open and self._can_send:
            buffer = self._free.pop() if self._free else bytearray(_LENGTH.size + MESSAGE_BYTES)
            try:
                count = self._socket.recv_into(memoryview(buffer)[_LENGTH.size :])
            except BlockingIOError:
                self._free.append(buffer)
                break
            except OSError:
                count = 0
            if not count:  # the wire has closed its end
                self.close()
                break
            _LENGTH.pack_into(buffer, 0, count)
            message = memoryview(buffer)[: _LENGTH.size + count]
            self._sends.append((self._endpoint.send(message, control=False), buffer))
            self._credits -= 1
            self._last_sent, moved = time.monotonic(), True
        return moved

    # Liveness

    def _on_message(self) -> None:
        self._last_received, self._replies, self._reply_awaited = time.monotonic(), 0, False
        self._on_sign_of_life(self._last_received)

    def _on_sign_of_life(self, now: float) -> None:
        self._last_seen, self._probe_unanswered = now, False
        self._on_life()

    @property
    def _is_waiting(self) -> bool:
        """Return True if the peer owes a sign of life."""
        return self._last_sent > self._last_received or not self._can_send

    def _tick(self, now: float) -> None:
        if not self._is_waiting:
            self._ticking = self._probe_unanswered = False
            self._loop.cancel_timer(self._tick)
        elif self._probe_unanswered:
            # The kernel is asked before the time is compared: this thread may have been late.
            if self._probe_acked():
                self._on_sign_of_life(now)
            elif now - self._probed > self._timeout * (1 - 1 / PROBE_SHARE):
                self._break(f"no sign of life for {now - self._last_seen:.2f} s")
        elif now - self._probed >= self._timeout / PROBE_SHARE:
            self._probe(now)

    def _probe_acked(self) -> bool:
        """Return True if the peer's kernel has acknowledged the last probe."""
        answer = fcntl.ioctl(self._side_channel, termios.TIOCOUTQ, bytes(_UNACKED.size))
        return int(_UNACKED.unpack(answer)[0]) <= self._sent_since_probe

    def _probe(self, now: float) -> None:
        self._send_side_channel(PROBE)
        self._probed, self._probe_unanswered, self._sent_since_probe = now, True, 0
        if self._reply_awaited:  # a hung peer must not be sent any number of them
            return
        self._reply_awaited = True
        try:
            self._endpoint.send(PROBE, control=True)
        except UcxError as error:
            self._break(str(error))
        self._loop.call_soon(self._progress)

    def _send_side_channel(self, kind: bytes) -> None:
        with suppress(OSError):  # a broken one is noticed when it is read
            self._sent_since_probe += self._side_channel.send(kind)

    def _on_side_channel(self, readable: bool, writable: bool) -> None:
        try:
            data = self._side_channel.recv(64)
        except BlockingIOError:
            return
        except OSError as error:
            self._break((error.strerror or type(error).__name__).lower())
            return
        if not data:
            self._break("closed by the peer")
            return
        if PROBE in data:
            self._send_side_channel(REPLY)
        self._replies += data.count(REPLY)
        if self._replies >= MAX_REPLIES:
            self._break("UCX delivers nothing, while the peer replies on its socket")

    # The end

    def _break(self, reason: str) -> None:
        """Have the wire drop the path, and close once it has: it would take a closed socket for the reason."""
        if self.open:
            self._on_broken(reason)
            self._reading = False
            self._loop.register(self._socket, self._on_socket, reading=False)
            self._cancel()

    def close(self) -> None:
        """Close everything; the wire has closed its end, or is about to."""
        if self._socket.fileno() >= 0:
            self._loop.unregister(self._socket)
            self._socket.close()
            if self._cancelled:
                self._on_closed()
        if self.open:
            self._cancel()

    def _cancel(self) -> None:
        """Cancel everything in flight, which may take UCX a while."""
        self.open = False
        self._loop.unregister(self._side_channel)
        self._side_channel.close()
        self._loop.unregister(self._endpoint)
        self._loop.cancel_timer(self._tick)
        self._endpoint.close()
        self._loop.call_every(CLOSE_PERIOD, self._poll_cancelled)
        self._poll_cancelled(time.monotonic())

    def _poll_cancelled(self, now: float) -> None:
        """Release everything once UCX has."""
        if not self._endpoint.poll_closed():
            return
        self._cancelled = True
        self._loop.cancel_timer(self._poll_cancelled)
        for kept in (self._sends, self._receives, self._controls):
            kept.clear()
        del self._endpoint  # and its worker
        if self._socket.fileno() < 0:
            self._on_closed()
