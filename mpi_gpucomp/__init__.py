"""GPU-aware MPI with compressed collectives."""

from mpi_gpucomp.errors import BufferError, DeviceError, FrameError, GpucompError, SpecError, StreamError

__all__ = ["BufferError", "DeviceError", "FrameError", "GpucompError", "SpecError", "StreamError"]
