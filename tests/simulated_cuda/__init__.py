"""A CUDA machine in software, for tests: the driver's library, and a stand-in for the names of CuPy that are used."""

from .machine import SETTINGS, CudaError, Machine, machine

__all__ = ["SETTINGS", "CudaError", "Machine", "machine"]
