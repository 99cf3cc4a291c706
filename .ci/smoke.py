"""Tries an installed package: its kernel texts are those of the checkout (the argument), its host library runs them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import mpi_gpucomp
from mpi_gpucomp.codec.base import OPS
from mpi_gpucomp.device import get_device
from mpi_gpucomp.device.build import LIBRARIES, kernels_directory, library_directory


def check_files(checkout: Path) -> None:
    """Compare what the package holds with what the checkout has."""
    package = Path(mpi_gpucomp.__file__).parent
    assert checkout.parent not in package.parents, f"imported from the checkout: {package}"
    assert kernels_directory() == package / "kernels", kernels_directory()
    assert texts(kernels_directory()) == texts(checkout), "the kernels of the wheel are not those of the checkout"
    built = {path.name for path in library_directory().iterdir()}
    assert built == {f"libgpucomp-{name}.so" for name in [*LIBRARIES, "core"]}, built
    assert (package / "py.typed").is_file()


def texts(kernels: Path) -> dict[str, bytes]:
    """Read every kernel text."""
    return {path.name: path.read_bytes() for path in kernels.iterdir()}


def check_kernel() -> None:
    """Add two arrays with the host library."""
    to, source = np.arange(1000, dtype=np.float32), np.ones(1000, dtype=np.float32)
    stream = get_device("host").stream()
    stream.launch("reduce_f32", 1, to.ctypes.data, source.ctypes.data, to.size, OPS["sum"])
    stream.synchronize()
    stream.close()
    assert np.array_equal(to, np.arange(1, 1001, dtype=np.float32)), to


def write_values(path: Path) -> None:
    """Leave numbers for the command line to measure the codecs with."""
    np.save(path, np.random.default_rng(1).normal(0, 0.02, 1 << 16).astype(np.float32))


if __name__ == "__main__":
    check_files(Path(sys.argv[1]))
    check_kernel()
    write_values(Path("values.npy"))
