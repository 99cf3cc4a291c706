"""torch's CUDA streams: what a collective has queued on them, and who has to wait for it.

After the messages, copies and divisions are queued on the streams that were current where the operation was called.
Who waits may have other current streams, in the same thread or not.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Queued", "current_streams", "devices_of", "on_streams"]


def devices_of(result: Any) -> list[int | str | torch.device]:
    """Return the devices of the tensors in nested lists, except the CPU."""
    devices: dict[torch.device, None] = {}
    pending = [result]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            if item.device.type != "cpu":
                devices[item.device] = None
        elif isinstance(item, (list, tuple)):
            pending.extend(reversed(item))
    return [*devices]


def current_streams(tensors: Any) -> list[Any]:
    """Return this thread's current stream on each GPU that has some of the tensors."""
    gpus = (device for device in devices_of(tensors) if torch.device(device).type == "cuda")
    return [torch.cuda.current_stream(device) for device in gpus]


@contextmanager
def on_streams(streams: list[Any]) -> Iterator[None]:
    """Make streams current, one of each GPU; the first one's GPU becomes the current one."""
    with ExitStack() as stack:
        for stream in reversed(streams):
            stack.enter_context(torch.cuda.stream(stream))
        yield


class Queued:
    """What is queued on this thread's current streams, as far as it concerns some tensors."""

    def __init__(self, tensors: Any) -> None:
        """Record an event on each of the streams."""
        self._events = [(stream.device, stream.record_event()) for stream in current_streams(tensors)]

    def precede(self) -> None:
        """Make the current streams of this thread wait for it; the host does not wait."""
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)
