"""Buffers that a schedule cannot work on where they are: with gaps, at odd addresses, or on another device.

They travel by way of contiguous memory on the call's device, filled before the first step and emptied behind the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.comm.specs import aligned
from mpi_gpucomp.device import Buffer, get_device, order_after
from mpi_gpucomp.device.pack import gather, scatter
from mpi_gpucomp.engine.layout import Blocks

if TYPE_CHECKING:
    from mpi_gpucomp.device import Device, Memory, Stream

__all__ = ["Packing", "device_of"]


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
