"""A wire of the core as Python sees it: messages between ranks, the run loop, and the events that need Python.

Messages are non-blocking and ordered for each pair of ranks and tag. A message may be shorter than the buffer of its
receive, and never longer. Ranks also exchange small control messages, which need no posted receive and no tag.
"""

from __future__ import annotations

import ctypes
import errno
import os
from ctypes import byref, c_int32, c_int64, c_void_p
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi_gpucomp.core.library import core
from mpi_gpucomp.errors import FrameError, GpucompError, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CoreEvent", "Transfer", "Wire"]

TEXT_BYTES = 1024
CONTROL_BYTES = 1 << 12
REFUSED, FAULTY, NO_MESSAGE, MOVED = 2, 3, -1, 1


class CoreEvent(NamedTuple):
    """Something that needs Python: its kind, a code, and the handles of the task and op that it is about."""

    kind: int
    code: int
    task: int
    op: int


class Transfer:
    """A posted send or receive."""

    def __init__(self, wire: Wire, handle: int, peer: int, tag: int) -> None:
        """Describe a transfer of the core."""
        self._wire, self._handle, self._peer, self._tag = wire, handle, peer, tag
        self.nbytes = self.rail = 0
        """The length of the message, and the rail that carried it: valid once it has completed."""
        self.posted = perf_counter_ns()
        """When it was posted, for the trace."""
        self._done = False

    def done(self) -> bool:
        """Return True if the transfer has completed; may raise its error."""
        if self._done:
            return True
        nbytes, rail, text = c_int64(), c_int32(), ctypes.create_string_buffer(TEXT_BYTES)
        state = core().gc_test(self._wire.handle, self._handle, byref(nbytes), byref(rail), text, TEXT_BYTES)
        if state == FAULTY:
            raise self._wire.error()
        if not state:
            return False
        self.nbytes, self.rail, self._done = nbytes.value, rail.value, True
        core().gc_release(self._wire.handle, self._handle)
        if state == REFUSED:
            raise FrameError(
                f"message from rank {self._peer}, tag {self._tag}",
                expected="a message that fits the receive buffer",
                got=text.value.decode(),
                remedy="Pass a receive buffer as large as the message.",
                rank=self._wire.rank,
            )
        return True

    def cancel(self) -> bool:
        """Cancel a receive that no message has matched; return False if one has, and it continues."""
        if self._done or not core().gc_cancel(self._wire.handle, self._handle):
            return False
        self._done = True
        return True


class Wire:
    """The messages of one communicator, and the loop that moves them."""

    def __init__(self, wire: int, rank: int, size: int, largest_tag: int) -> None:
        """Own a wire of the core; tags are 0 .. `largest_tag`."""
        self.rank, self.size, self.largest_tag = rank, size, largest_tag
        self.kind, self.why = "", ""
        """What carries the messages: mpi, tcp, tcp+mpi or rails; and why it was selected."""
        self.derived_comms: list[Any] = []
        """Further communicators of MPI, made and freed by others, that are revoked together with this wire."""
        self._wire, self.handle = wire, core().gc_context_new(wire)
        """The wire and the context of the core that it belongs to."""
        if not self.handle:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a communicator")
        self._memory = ctypes.create_string_buffer(CONTROL_BYTES)

    @property
    def title(self) -> str:
        """Return what carries the messages, and why."""
        return f"{self.kind}: {self.why}" if self.why else self.kind

    # The run loop

    def run(self, seconds: float = 0.0, *, foreground: bool = True, until_moved: bool = False) -> bool:
        """Move chunks until there is an event or the time is over; return True if anything moved.

        `foreground` takes over from a thread in the background; with `until_moved`, return after any progress. Releases
        the GIL, and sleeps while there is nothing to do.
        """
        return bool(core().gc_run(self.handle, int(seconds * 1e9), foreground, until_moved) & MOVED)

    def interrupt(self) -> None:
        """Let another thread's `run` return soon."""
        core().gc_interrupt(self.handle)

    def events(self) -> Iterator[CoreEvent]:
        """Yield the events so far."""
        kind, code, task, op = c_int32(), c_int32(), c_void_p(), c_void_p()
        while core().gc_next_event(self.handle, byref(kind), byref(code), byref(task), byref(op)):
            yield CoreEvent(kind.value, code.value, task.value or 0, op.value or 0)

    @property
    def sleeps(self) -> int:
        """How often a thread has slept in `run`."""
        count: int = core().gc_sleeps(self.handle)
        return count

    def set_polling(self, *, preempting: bool, eager_polls: int = 4) -> None:
        """Report stalled tasks from now on, or no more."""
        core().gc_set_polling(self.handle, eager_polls, preempting)

    # Messages

    def send(self, peer: int, tag: int, address: int, nbytes: int) -> Transfer:
        """Post a send; the memory must not change until it has completed."""
        self.check()
        return Transfer(self, core().gc_send(self.handle, peer, tag, address, nbytes), peer, tag)

    def receive(self, peer: int, tag: int, address: int, capacity: int) -> Transfer:
        """Post a receive for a message of at most `capacity` bytes."""
        self.check()
        return Transfer(self, core().gc_receive(self.handle, peer, tag, address, capacity), peer, tag)

    def probe_any(self) -> int | None:
        """Return the tag of an unexpected message (no receive is posted for it), if there is one."""
        tag: int = core().gc_probe_any(self.handle)
        return None if tag < 0 else tag

    def send_control(self, peer: int, message: bytes) -> None:
        """Send a control message; those from one rank arrive in order."""
        if not core().gc_send_control(self.handle, peer, message, len(message)):
            raise self.error()

    def recv_control(self) -> tuple[int, bytes] | None:
        """Return the sender and the bytes of the next control message, if one has arrived."""
        peer = c_int32()
        length = core().gc_next_control(self.handle, byref(peer), self._memory, len(self._memory))
        if length < NO_MESSAGE:
            self._memory = ctypes.create_string_buffer(NO_MESSAGE - 1 - length)
            length = core().gc_next_control(self.handle, byref(peer), self._memory, len(self._memory))
        return None if length == NO_MESSAGE else (peer.value, ctypes.string_at(self._memory, length))

    @property
    def bytes_sent(self) -> int:
        """Of all messages so far, without control messages."""
        return self._bytes()[0]

    @property
    def bytes_received(self) -> int:
        """Of all messages so far, without control messages."""
        return self._bytes()[1]

    def _bytes(self) -> tuple[int, int]:
        sent, received = c_int64(), c_int64()
        core().gc_bytes(self.handle, byref(sent), byref(received))
        return sent.value, received.value

    def relays(self, bytes_per_second: float) -> bool:
        """Return True if messages are forwarded while they arrive, between nodes on links of this bandwidth."""
        return False

    # Failure

    def fault(self) -> tuple[int, str]:
        """Return why the wire cannot be used any more: MPI's error code, or a text; 0 and "" while it can."""
        text = ctypes.create_string_buffer(TEXT_BYTES)
        code = core().gc_fault(self.handle, text, TEXT_BYTES)
        return code, text.value.decode(errors="replace")

    def check(self) -> None:
        """Raise the wire's error, if it has one."""
        if any(self.fault()):
            raise self.error()

    def error(self) -> GpucompError:
        """Return the wire's fault as an error."""
        return RankFailedError(
            "wire",
            expected="all ranks reachable",
            got=self.fault()[1],
            remedy="See the errors of the other ranks. This communicator cannot be used any more.",
            rank=self.rank,
        )

    def revoke(self) -> None:
        """Make pending and later calls of every rank fail, where the network supports it."""
        core().gc_revoke(self.handle, self.fault()[1].encode())

    def close(self) -> None:
        """Release the wire's resources; collective, with nothing in flight."""
        core().gc_context_close(self.handle)

    def abandon(self) -> None:
        """Release what this rank can release alone, where other ranks may not call `close`."""

    def __del__(self) -> None:
        """Free the memory of the wire: no task and no transfer refers to it any more."""
        if getattr(self, "handle", None):
            core().gc_context_free(self.handle)
            core().gc_wire_free(self._wire)
