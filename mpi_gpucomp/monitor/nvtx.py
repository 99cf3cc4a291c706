"""Names for the work that is queued on a GPU, as Nsight Systems shows them (NVTX); on the host, nothing."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

__all__ = ["gpu_range"]


class _Range:
    """A range that can be entered again and again."""

    def __init__(self, name: str, nvtx: Any) -> None:
        self._name, self._push, self._pop = name, nvtx.RangePush, nvtx.RangePop

    def __enter__(self) -> None:
        self._push(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pop()


def gpu_range(name: str, device: str) -> AbstractContextManager[None]:
    """Return what gives work on a device a name, for the length of each `with`."""
    if not device.startswith("cuda"):
        return nullcontext()
    try:
        from cupy.cuda import nvtx
    except ImportError:
        return nullcontext()
    return _Range(f"gpucomp {name}", nvtx)
