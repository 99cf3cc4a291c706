"""Buffers that cannot be used where they are: staged on the host for MPI, or packed for the engine.

`HostStaging` serves passed-through calls: elements on a GPU that MPI cannot access in this call, with gaps between
them, or of a type that mpi4py does not know are copied through pinned host memory. `PackedBuffers` serves the engine:
elements with gaps, at unaligned addresses or on another device are packed into contiguous memory on the call's device,
before the first step and after the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp._call.buffers import is_aligned
from mpi_gpucomp.device import DTYPES, Buffer, as_buffer, get_device, order_after
from mpi_gpucomp.device.buffer import type_name
from mpi_gpucomp.device.pack import gather, scatter
from mpi_gpucomp.device.producer import mark_producer
from mpi_gpucomp.engine.program import Blocks
from mpi_gpucomp.errors import BufferSpecError
from mpi_gpucomp.transport.gpu_aware import cuda_aware

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp._call.calls import Call
    from mpi_gpucomp.device import Device, Memory, Stream

__all__ = [
    "HostStaging",
    "PackedBuffers",
    "device_of",
    "mpi4py_accepts",
    "mpi_reaches_gpu",
    "mpi_supports",
    "wait_for_producers",
]

_memory = MPI.memory.fromaddress
_DATATYPES = {
    dtype.name: MPI.Datatype.fromcode({"b": "?"}.get(dtype.kind, f"{dtype.kind}{dtype.itemsize}"))
    for dtype in DTYPES
    if dtype.name not in ("float16", "bfloat16")
}
_VECTORS = {"Allgatherv": (1,), "Gatherv": (1,), "Scatterv": (0,), "Alltoallv": (0, 1)}
"""Which arguments of a method have counts and displacements."""


def mpi_supports(call: Call) -> bool:
    """Return True if MPI has the call's operation for elements of its type."""
    return call.op == "replace" or call.blocks.buffer.dtype.name in _DATATYPES


def mpi_reaches_gpu(*, blocking: bool) -> bool:
    """Return True if a collective of the MPI library may be given addresses of GPU memory.

    A CUDA-aware Open MPI does not take them in non-blocking collectives: it reduces and copies there with the host's
    instructions. Without a progress thread, blocking calls are made as non-blocking ones.
    """
    return blocking and MPI.Query_thread() == MPI.THREAD_MULTIPLE and cuda_aware().aware


def wait_for_producers(title: str, args: tuple[Any, ...], *, reaches_gpu: bool, rank: int) -> None:
    """Wait until the arguments of a call that only the MPI library can run are complete on their GPUs.

    Raise if the library cannot access them there.
    """
    for arg in args:
        data = arg[0] if isinstance(arg, (list, tuple)) and arg else arg
        if isinstance(data, np.ndarray) or not hasattr(data, "__cuda_array_interface__"):
            continue
        if not reaches_gpu:
            raise BufferSpecError(
                title,
                expected="memory of the host, or a call that can be staged through it",
                got=f"a {type_name(data)} on a GPU, with a datatype or an operation that only the MPI library supports",
                remedy="Pass a copy on the host, or an array of a basic type and one of SUM, PROD, MIN, MAX.",
                rank=rank,
            )
        _wait_for_producer(mark_producer(as_buffer(data)))


def mpi4py_accepts(call: Call) -> bool:
    """Return True if mpi4py takes the arguments of a call as they are."""
    if call.unsupported is not None:
        return True
    buffers = [blocks.buffer for blocks in (call.sent, call.received) if blocks]
    # mpi4py does not recognise the element type of an unaligned array.
    direct = all(buffer.device == "host" and buffer.contiguous and is_aligned(buffer) for buffer in buffers)
    return direct and call.blocks.buffer.dtype.name in _DATATYPES and all(map(_is_mpi4py_argument, call.args))


def _is_mpi4py_argument(arg: Any) -> bool:
    """Return True if mpi4py surely takes an argument: a list was written for it."""
    return isinstance(arg, (np.ndarray, list, tuple, int, MPI.Op, bytes, bytearray, memoryview)) or (
        arg is None or arg is MPI.IN_PLACE
    )


def _wait_for_producer(buffer: Buffer) -> None:
    """Wait until pending work on a buffer has completed: MPI does not order itself after streams."""
    if buffer.produced is not None:
        buffer.produced.wait()


class HostStaging:
    """The arguments of a call as MPI can take them, through pinned host memory where needed."""

    def __init__(self, call: Call, *, reaches_gpu: bool) -> None:
        """Copy the send buffers; `finish` copies the receive buffers back.

        With `reaches_gpu` MPI gets addresses of GPU memory.
        """
        self._method, self._reaches_gpu = call.method, reaches_gpu
        self._finish: list[Callable[[], None]] = []
        self._hosts: dict[int, int] = {}
        new = list(call.args)
        if call.method == "Bcast":
            new[0] = self._spec(call.received, 1)
        else:
            # In place, the receive buffer begins with the input, and mpi4py wants all of that.
            received = call.sent if call.deferred_output else call.received
            for place, blocks in enumerate((call.sent, received)):
                if new[place] is not None and new[place] is not MPI.IN_PLACE and blocks is not None:
                    new[place] = self._spec(blocks, place)
        self.args = tuple(new)

    def _spec(self, blocks: Blocks | None, place: int) -> Any:
        """Write an argument (0: send, 1: receive) in mpi4py's form: with one count, one per rank, or in total."""
        assert blocks is not None
        buffer = blocks.buffer
        address = self._on_host(buffer, writable=place == 1)
        size = buffer.dtype.itemsize
        datatype = _DATATYPES.get(buffer.dtype.name, MPI.BYTE)
        unit = size if datatype is MPI.BYTE else 1
        counts = [count * unit for count in blocks.counts]
        starts = [start * unit for start in blocks.starts]
        whole = _memory(address, buffer.nbytes)
        if place in _VECTORS.get(self._method, ()):
            return [whole, counts, starts, datatype]
        return [whole, sum(counts) if self._method == "Reduce_scatter" else counts[0], starts[0], datatype]

    def _on_host(self, buffer: Buffer, writable: bool) -> int:
        """Return the address of a buffer's elements in contiguous memory that MPI can access."""
        if buffer.device == "host" and buffer.contiguous:
            return buffer.address
        if buffer.contiguous and self._reaches_gpu:
            _wait_for_producer(buffer)
            return buffer.address
        if id(buffer) not in self._hosts:
            self._hosts[id(buffer)] = self._stage(buffer, writable)
        return self._hosts[id(buffer)]

    def _stage(self, buffer: Buffer, writable: bool) -> int:
        device = get_device(buffer.device)
        stream, pinned = device.stream(), device.pinned(buffer.nbytes)
        order_after(buffer, stream)
        gather(buffer, pinned, stream)
        stream.synchronize()

        def copy_back() -> None:
            if writable and not buffer.readonly:
                scatter(pinned, buffer, stream)
            stream.close()
            pinned.release()

        self._finish.append(copy_back)
        return pinned.address

    def finish(self) -> None:
        """Copy the receive buffers back."""
        for work in self._finish:
            work()


def device_of(*blocks: Blocks | None) -> Device:
    """Return the device to work on: the first buffer's that is on a GPU, or else the host."""
    names = [one.buffer.device for one in blocks if one is not None]
    return get_device(next((name for name in names if name != "host"), "host"))


class PackedBuffers:
    """The packed copies of one call's buffers."""

    def __init__(self, device: Device, *, raw: bool = False) -> None:
        """Pack on this device; with `raw`, messages are sent from and received into the packed memory itself."""
        self._device, self._raw = device, raw
        self._packed: dict[int, tuple[Buffer, Memory, bool]] = {}
        self._deferred: tuple[Buffer, Memory] | None = None

    def device_view(self, blocks: Blocks | None, *, writable: bool) -> Blocks | None:
        """Return blocks that a schedule can work on: the caller's, or a packed copy."""
        if blocks is None:
            return None
        buffer = blocks.buffer
        if buffer.contiguous and is_aligned(buffer) and buffer.device == self._device.name:
            return blocks
        known = self._packed.get(id(buffer))
        memory = known[1] if known else self._device.alloc(buffer.nbytes)
        self._packed[id(buffer)] = buffer, memory, writable or bool(known and known[2])
        return Blocks(self._elements(memory, buffer), blocks.starts, blocks.counts)

    def deferred_output(self, blocks: Blocks) -> Blocks:
        """Return memory for an output that `unpack` copies to its place."""
        buffer = blocks.buffer.slice(blocks.starts[0], blocks.counts[0])
        memory = self._device.alloc(buffer.nbytes)
        self._deferred = buffer, memory
        return Blocks(self._elements(memory, buffer), [0], [buffer.count])

    def _elements(self, memory: Memory, like: Buffer) -> Buffer:
        return Buffer(memory.address, like.dtype, (like.count,), device=self._device.name, owner=memory)

    @property
    def needed(self) -> bool:
        """Return True if any buffer is packed or deferred."""
        return bool(self._packed or self._deferred)

    def pack(self, stream: Stream) -> None:
        """Queue the copies into packed memory; of outputs too, since a call may leave parts of them unchanged."""
        for buffer, memory, _ in self._packed.values():
            if buffer.device == self._device.name:
                order_after(buffer, stream)
            _copy_packed(buffer, memory, stream, unpack=False)
        if self._raw:
            stream.synchronize()  # the wire reads and writes this memory without regard to the stream

    def unpack(self, stream: Stream) -> None:
        """Queue the copies out of packed memory, and release it after them."""
        if self._deferred is not None:
            buffer, memory = self._deferred
            stream.copy(buffer.address, memory.address, buffer.nbytes)
            stream.release(memory)
        for buffer, memory, writable in self._packed.values():
            if writable:
                _copy_packed(buffer, memory, stream, unpack=True)
            stream.release(memory)


def _copy_packed(buffer: Buffer, memory: Memory, stream: Stream, *, unpack: bool) -> None:
    """Copy between a buffer on any device and contiguous memory on the stream's device."""
    if buffer.device == stream.device.name:
        scatter(memory, buffer, stream) if unpack else gather(buffer, memory, stream)
        return
    device = get_device(buffer.device)
    local = device.stream()
    with device.alloc(buffer.nbytes) as packed:
        if unpack:
            stream.copy(packed.address, memory.address, buffer.nbytes)
            stream.synchronize()
            scatter(packed, buffer, local)
            local.synchronize()
        else:
            order_after(buffer, local)
            gather(buffer, packed, local)
            local.synchronize()
            stream.copy(memory.address, packed.address, buffer.nbytes)
            stream.synchronize()
    local.close()
