"""Packages that some codecs need and that may be missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mpi_gpucomp.errors import DeviceError

__all__ = ["needed"]


def needed(package: str, topic: str, remedy: str) -> Any:
    """Import a package for what `topic` names, or say how to get it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise DeviceError(topic, expected=f"the package {package}", got=str(error), remedy=remedy) from error
