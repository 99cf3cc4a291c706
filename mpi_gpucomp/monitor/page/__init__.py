"""A page of what was recorded: alarms, where time went, a rank x rank heat map and a timeline, in one file."""

from mpi_gpucomp.monitor.page.page import page

__all__ = ["page"]
