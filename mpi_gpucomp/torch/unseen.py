"""Keeps torch.compile out of the backend: a compiled model that synchronises in its forward would have it traced."""

from __future__ import annotations

from contextlib import suppress
from types import FunctionType
from typing import TypeVar

__all__ = ["unseen"]

Class = TypeVar("Class", bound=type)


def unseen(cls: Class) -> Class:
    """Let the methods of a class, and what they call, run as they are, even inside a compiled model.

    torch.compiler.disable would do it too, and import the whole compiler, which takes seconds.
    """
    with suppress(ImportError, AttributeError):  # a torch whose compiler has no such setting
        from torch._C._dynamo import eval_frame

        frames = eval_frame._FrameAction.SKIP
        leave = eval_frame._FrameExecStrategy(frames, frames)
        for method in vars(cls).values():
            if isinstance(method, FunctionType):
                eval_frame.set_code_exec_strategy(method.__code__, leave)
    return cls
