"""What `python -m mpi_gpucomp` can do."""
