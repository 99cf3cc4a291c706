"""Files that a monitored process writes, possibly in a directory that others may write to, such as /tmp.

Another user may have put a link or a file there under the name that ours will have. It is never followed, nor is a file
of another user written to. What we make is for its owner alone: it shows names, paths and stacks of the program.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["PUBLIC", "append", "create", "replace"]

PRIVATE, PUBLIC = 0o600, 0o644


def _make_directory(path: Path) -> None:
    """Make a directory and those above it for their owner alone; those that exist stay as they are."""
    if not path.is_dir():
        _make_directory(path.parent)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)


def create(path: Path, mode: int = PRIVATE) -> int:
    """Return the descriptor of a new, empty file for reading and writing, in place of whatever has its name."""
    _make_directory(path.parent)
    path.unlink(missing_ok=True)  # removes a link, not its target
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def replace(path: Path, text: str, mode: int = PRIVATE) -> None:
    """Write a file that readers never see half written."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with open(create(part, mode), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), mode)  # whatever the umask
        file.write(text)
    part.replace(path)


def append(path: Path, text: str) -> None:
    """Append to a file of this user, made if it does not exist."""
    _make_directory(path.parent)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags, PRIVATE), "a", newline="", encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a file of this user")
        file.write(text)
