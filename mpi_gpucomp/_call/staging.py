"""The arguments of mpi4py's own methods, for calls that go straight to MPI: small ones, and those where it is faster.

What mpi4py can reach by itself is passed on as it came. Elements on a GPU that this MPI cannot reach, with gaps, or of
a type that mpi4py does not know go by way of host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp._call.buffers import aligned
from mpi_gpucomp.device import DTYPES, Buffer, get_device, order_after
from mpi_gpucomp.device.pack import gather, scatter
from mpi_gpucomp.engine.layout import Blocks
from mpi_gpucomp.transport.gpu_aware import cuda_aware

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp._call.calls import Form
    from mpi_gpucomp.device import Device, Memory, Stream

__all__ = ["Detour", "Packing", "can_do", "device_of", "passes"]

_memory = MPI.memory.fromaddress
_DATATYPES = {
    dtype.name: MPI.Datatype.fromcode({"b": "?"}.get(dtype.kind, f"{dtype.kind}{dtype.itemsize}"))
    for dtype in DTYPES
    if dtype.name not in ("float16", "bfloat16")
}
_VECTORS = {"Allgatherv": (1,), "Gatherv": (1,), "Scatterv": (0,), "Alltoallv": (0, 1)}
"""Which arguments of a method have counts and displacements."""


def can_do(form: Form) -> bool:
    """Say whether MPI has an operation for elements of this type, if the call needs one."""
    return form.op == "replace" or form.some.buffer.dtype.name in _DATATYPES


def passes(form: Form, args: tuple[Any, ...]) -> bool:
    """Say whether mpi4py can take the arguments as they are."""
    buffers = [blocks.buffer for blocks in (form.sent, form.received) if blocks]
    # mpi4py does not know the elements of an array at an odd address.
    near = all(buffer.device == "host" and buffer.contiguous and aligned(buffer) for buffer in buffers)
    return near and form.some.buffer.dtype.name in _DATATYPES and all(_known(arg) for arg in args)


def _known(arg: Any) -> bool:
    """Say whether an argument is surely one of mpi4py's: what is in a list was written for it."""
    return isinstance(arg, (np.ndarray, list, tuple, int, MPI.Op, bytes, bytearray, memoryview)) or (
        arg is None or arg is MPI.IN_PLACE
    )


def _wait_for(buffer: Buffer) -> None:
    """Wait until those who fill a buffer have done so: MPI knows nothing of streams."""
    stream = get_device(buffer.device).stream()
    order_after(buffer, stream)
    stream.synchronize()
    stream.close()


class Detour:
    """The arguments of a call as MPI can take them, by way of host memory where it must be."""

    def __init__(self, method: str, form: Form, args: tuple[Any, ...]) -> None:
        """Copy what is sent; `finish` copies back what has been received."""
        self._method = method
        self._finish: list[Callable[[], None]] = []
        self._hosts: dict[int, int] = {}
        new = list(args)
        if method == "Bcast":
            new[0] = self._spec(form.received, 1)
        else:
            # In place, what is received begins with what is sent, and mpi4py wants all of that.
            for place, blocks in enumerate((form.sent, form.sent if form.lands_at_start else form.received)):
                if new[place] is not None and new[place] is not MPI.IN_PLACE and blocks is not None:
                    new[place] = self._spec(blocks, place)
        self.args = tuple(new)

    def _spec(self, blocks: Blocks | None, place: int) -> Any:
        """Write an argument (0: send, 1: receive) as mpi4py has it: with counts for all, for each, or in total."""
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
        """Return the address of a buffer's elements without gaps, where MPI reaches them, copied there if need be."""
        if buffer.device == "host" and buffer.contiguous:
            return buffer.address
        if buffer.contiguous and cuda_aware().aware:
            _wait_for(buffer)
            return buffer.address
        if id(buffer) not in self._hosts:
            self._hosts[id(buffer)] = self._copied(buffer, writable)
        return self._hosts[id(buffer)]

    def _copied(self, buffer: Buffer, writable: bool) -> int:
        device = get_device(buffer.device)
        stream, near = device.stream(), device.pinned(buffer.nbytes)
        order_after(buffer, stream)
        gather(buffer, near, stream)
        stream.synchronize()

        def back() -> None:
            if writable and not buffer.readonly:
                scatter(near, buffer, stream)
            stream.close()
            near.release()

        self._finish.append(back)
        return near.address

    def finish(self) -> None:
        """Copy back what has been received."""
        for work in self._finish:
            work()


# Buffers that a schedule cannot work on where they are: with gaps, at odd addresses, or on another device.
#
# They travel by way of contiguous memory on the call's device, filled before the first step and emptied behind the
# last.


def device_of(*blocks: Blocks | None) -> Device:
    """Return the device to work on: the GPU, if any of the buffers is there."""
    names = {one.buffer.device for one in blocks if one is not None}
    return get_device(max(names, key=lambda name: name != "host"))


class Packing:
    """The detours of one call: which memory stands for which buffer."""

    def __init__(self, device: Device, *, wire: bool = False) -> None:
        """Work on this device; nothing takes a detour yet. `wire` says that messages come and go without a codec."""
        self._device, self._wire = device, wire
        self._detours: dict[int, tuple[Buffer, Memory, bool]] = {}
        self._landing: tuple[Buffer, Memory] | None = None

    def via(self, blocks: Blocks | None, *, writable: bool) -> Blocks | None:
        """Return blocks that a schedule can work on, in the caller's memory or in ours."""
        if blocks is None:
            return None
        buffer = blocks.buffer
        if buffer.contiguous and aligned(buffer) and buffer.device == self._device.name:
            return blocks
        known = self._detours.get(id(buffer))
        memory = known[1] if known else self._device.alloc(buffer.nbytes)
        self._detours[id(buffer)] = buffer, memory, writable or bool(known and known[2])
        return Blocks(self._elements(memory, buffer), blocks.starts, blocks.counts)

    def landing(self, blocks: Blocks) -> Blocks:
        """Return memory for an output that may be copied to where it belongs only at the end."""
        buffer = blocks.buffer.slice(blocks.starts[0], blocks.counts[0])
        memory = self._device.alloc(buffer.nbytes)
        self._landing = buffer, memory
        return Blocks(self._elements(memory, buffer), [0], [buffer.count])

    def _elements(self, memory: Memory, like: Buffer) -> Buffer:
        return Buffer(memory.address, like.dtype, (like.count,), device=self._device.name, owner=memory)

    @property
    def needed(self) -> bool:
        """Say whether anything takes a detour."""
        return bool(self._detours or self._landing)

    def fill(self, stream: Stream) -> None:
        """Queue the way in. Outputs are filled too: a call may leave parts of them as they are."""
        for buffer, memory, _ in self._detours.values():
            order_after(buffer, stream) if buffer.device == self._device.name else None
            _across(buffer, memory, stream, "gather")
        if self._wire:
            stream.synchronize()  # messages are sent from this memory, and received there, beside the stream

    def empty(self, stream: Stream) -> None:
        """Queue the way out, and give the memory back behind it."""
        if self._landing is not None:
            buffer, memory = self._landing
            stream.copy(buffer.address, memory.address, buffer.nbytes)
            stream.release(memory)
        for buffer, memory, writable in self._detours.values():
            if writable:
                _across(buffer, memory, stream, "scatter")
            stream.release(memory)


def _across(buffer: Buffer, memory: Memory, stream: Stream, way: str) -> None:
    """Copy between a buffer and contiguous memory of the stream's device, whichever device the buffer is on."""
    if buffer.device == stream.device.name:
        gather(buffer, memory, stream) if way == "gather" else scatter(memory, buffer, stream)
        return
    near = buffer.device
    local = get_device(near).stream()
    with get_device(near).alloc(buffer.nbytes) as packed:
        if way == "gather":
            order_after(buffer, local)
            gather(buffer, packed, local)
            local.synchronize()
            stream.copy(memory.address, packed.address, buffer.nbytes)
            stream.synchronize()
        else:
            stream.copy(packed.address, memory.address, buffer.nbytes)
            stream.synchronize()
            scatter(packed, buffer, local)
            local.synchronize()
    local.close()
