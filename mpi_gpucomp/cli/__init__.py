"""The commands of `gpucomp`, which is also `python -m mpi_gpucomp`."""
