"""What `import torch` calls, by the entry point `torch.backends`.

It stands in a file of its own: whoever imports mpi_gpucomp.torch first has torch call this in the middle of that.
"""

from __future__ import annotations

__all__ = ["autoload"]


def autoload() -> None:
    """Do nothing more: the import of the package, which came before this or is under way, registers the backend."""
